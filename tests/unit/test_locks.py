"""The lock file: where it cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from v100ctl.errors import V100ctlError
from v100ctl.locks import exclusive


def test_a_lock_makes_its_folder(tmp_path: Path) -> None:
    with exclusive(tmp_path / "state" / "x.lock"):
        assert (tmp_path / "state" / "x.lock").is_file()


def test_a_state_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(V100ctlError, match="cannot be written") as caught, exclusive(tmp_path / "file" / "x.lock"):
        pass
    assert caught.value.hint is not None
    assert "XDG_STATE_HOME" in caught.value.hint
