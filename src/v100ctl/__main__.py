"""``python -m v100ctl``: the same program as the ``v100ctl`` command."""

from v100ctl.cli import main

if __name__ == "__main__":
    main()
