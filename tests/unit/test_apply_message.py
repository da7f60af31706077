"""What a failed task says, from results as ansible-core returns them."""

from __future__ import annotations

from typing import Any

import pytest

from v100ctl.apply.runner import failure_message, retry_progress

REFUSED = {"failed": True, "msg": "non-zero return code", "rc": 3, "stderr": "one\n\ntwo\n", "stdout": "unseen"}


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"msg": "Task failed: Incorrect sudo password"}, "Incorrect sudo password"),
        ({"msg": "Task failed: Module failed: it broke"}, "it broke"),
        ({"msg": ["one", "two"]}, "one\ntwo"),
        ({"msg": {"a": 1}}, '{"a": 1}'),
        ({}, "it failed without a message"),
        (REFUSED, "non-zero return code\none\ntwo"),
        (
            {"msg": "non-zero return code", "rc": 3, "stderr": "", "stdout": "E: last words"},
            "non-zero return code\nE: last words",
        ),
        ({"msg": "non-zero return code", "rc": 3, "stderr": " ", "stdout": ""}, "non-zero return code\nexit code 3"),
        # The module's own words need no stderr.
        ({"msg": "no such unit", "stderr": "noise"}, "no such unit"),
        (
            {"msg": "Module result deserialization failed: No start of json char found", "module_stderr": "sudo: not found"},
            "Module result deserialization failed: No start of json char found\nsudo: not found",
        ),
        (
            {"msg": "Request failed", "response": "HTTP Error 404: Not Found", "url": "http://h/x", "status_code": 404},
            "Request failed\nHTTP Error 404: Not Found\nhttp://h/x",
        ),
        ({"censored": "the output has been hidden", "msg": "never"}, "its output is hidden by `no_log`"),
        ({"msg": "bad", "_ansible_delegated_vars": {"ansible_delegated_host": "builder"}}, "on builder: bad"),
        ({"msg": "\x1b[31mred\x1b[0m\r\nnext"}, "red\nnext"),
    ],
)
def test_failure_message(result: dict[str, Any], expected: str) -> None:
    assert failure_message(result) == expected


def test_a_loop_names_the_items_that_failed() -> None:
    items: list[dict[str, Any]] = [{"item": "fine", "failed": False, "msg": ""}]
    items += [{"item": f"item{number}", "failed": True, "msg": f"bad {number}"} for number in range(5)]

    message = failure_message({"msg": "One or more items failed", "results": items})

    assert message.splitlines() == ["item0: bad 0", "item1: bad 1", "item2: bad 2", "and 2 more of 6 items"]


def test_an_item_is_named_without_its_content() -> None:
    item = {"item": {"path": "/etc/v100ctl/instances/chat.env", "content": "KEY=secret"}, "failed": True, "msg": "no"}

    assert failure_message({"msg": "One or more items failed", "results": [item]}) == "/etc/v100ctl/instances/chat.env: no"


def test_a_censored_item_stays_hidden() -> None:
    item = {"censored": "hidden", "failed": True, "item": "x"}

    assert failure_message({"msg": "One or more items failed", "results": [item]}) == "x: its output is hidden by `no_log`"


def test_a_long_message_keeps_its_first_line_and_its_end() -> None:
    lines = failure_message({"msg": "\n".join(f"line {number}" for number in range(100))}).splitlines()

    assert len(lines) == 12
    assert (lines[0], lines[1], lines[-1]) == ("line 0", "...", "line 99")
    assert len(failure_message({"msg": "x" * 100_000})) <= 4000


SHOWN = (
    "[ERROR]: Task failed: Module failed: Error executing command: [Errno 2] No such file\nOrigin: /p.yml\n\nfatal: [h]: FAILED!"
)


def test_the_cause_that_ansible_shows_completes_the_message() -> None:
    assert failure_message({"msg": "Error executing command."}, SHOWN) == "Error executing command: [Errno 2] No such file"


def test_what_ansible_shows_of_something_else_is_left_out() -> None:
    assert failure_message({"msg": "Another message."}, SHOWN) == "Another message."
    assert failure_message({"censored": "hidden"}, SHOWN) == "its output is hidden by `no_log`"


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"stdout": '{"state": "running", "phase": "compile", "done": 12, "total": 214}'}, ("compile", 12, 214, "steps")),
        ({"stdout": '{"phase": "model", "done": 5, "total": 9, "unit": "bytes"}'}, ("model", 5, 9, "bytes")),
        ({"stdout": '{"phase": "unpack"}'}, ("unpack", 0, None, "steps")),
        (
            {"stdout": '{"package_locks": [{"pid": 210, "command": "apt-get", "path": "/var/lib/dpkg/lock"}]}'},
            ("waiting for apt: held by apt-get (pid 210)", 0, 0, "steps"),
        ),
        ({"stdout": '{"package_locks": []}', "attempts": 2}, ("Wait, attempt", 2, None, "steps")),
        # Not what it seems.
        ({"stdout": '{"phase": "compile", "done": -1, "total": true}'}, ("compile", 0, None, "steps")),
        ({"stdout": '{"phase": 7, "done": 1}', "attempts": 1}, ("Wait, attempt", 1, None, "steps")),
        ({"stdout": "{cut off", "attempts": 3}, ("Wait, attempt", 3, None, "steps")),
        ({"stdout": "[1]", "attempts": 3}, ("Wait, attempt", 3, None, "steps")),
        ({}, ("Wait, attempt", 0, None, "steps")),
    ],
)
def test_retry_progress(result: dict[str, Any], expected: tuple[str, int, int | None, str]) -> None:
    assert retry_progress("Wait", result) == expected
