"""``v100ctl try``: the README's first command, as a newcomer runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from v100ctl import practice

from .hosts import Done, on_host, v100ctl

if TYPE_CHECKING:
    from v100ctl.lab.hosts import Lab


def test_it_ends_with_an_answer_and_a_clean_audit(practiced: Done) -> None:
    assert practiced.code == 0, practiced.err
    assert f"Q: {practice.DEFAULT_QUESTION}" in practiced.out
    answer = practiced.out.split("A: ", 1)[1].splitlines()[0]
    assert answer.strip()
    assert "tokens/s" in practiced.out
    assert "audit: clean" in practiced.out
    assert "Traceback" not in practiced.err
    assert str(practice.inventory_path()) in practiced.out, "it says how to go on"


def test_what_it_made_is_an_ordinary_host(practiced: Done) -> None:
    assert practiced.code == 0, practiced.err
    done = v100ctl("provision", "-i", practice.inventory_path(), "--json")
    assert done.code == 0, done.err
    assert done.document["log"] is None, "Ansible did not run"
    assert done.document["hosts"][practice.HOST]["status"] == "unchanged"


def test_again_it_compiles_and_changes_nothing(practiced: Done, lab: Lab) -> None:
    assert practiced.code == 0, practiced.err
    host = lab.running(practice.HOST)
    started = on_host(host, "systemctl show --property ExecMainStartTimestampMonotonic v100-chat.service")
    done = v100ctl("try", "--question", "What is a GPU?")
    assert done.code == 0, done.err
    assert "Q: What is a GPU?" in done.out
    assert "compile" not in done.err
    assert on_host(host, "systemctl show --property ExecMainStartTimestampMonotonic v100-chat.service") == started


def test_down_and_up_again_uses_the_release_that_is_there(practiced: Done, lab: Lab) -> None:
    assert practiced.code == 0, practiced.err
    done = v100ctl("try", "--down")
    assert done.code == 0, done.err
    assert practice.HOST not in {state.name for state in lab.list()}
    assert not practice.inventory_path().exists()
    done = v100ctl("try", "--down")
    assert (done.code, "there was no practice host" in done.err) == (0, True)
    done = v100ctl("try")
    assert done.code == 0, done.err
    assert "compile" not in done.err
    assert practice.BUILDER not in {state.name for state in lab.list()}
