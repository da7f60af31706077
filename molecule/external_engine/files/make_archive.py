"""Packs a small engine as somebody hands it over, and prints its SHA-256. Arguments: the archive, its version, bad or nothing.

Two runs of one version give the same bytes, so that a second run of the role has nothing to do.
"""

import hashlib
import io
import sys
import tarfile
from pathlib import Path

path, version, *bad = sys.argv[1:]
PROGRAM = f"""#!/usr/bin/python3
import sys
import time
from pathlib import Path
print("engine {version}", (Path(__file__).resolve().parents[1] / "lib/kernels.so").read_text(), flush=True)
if "--serve" in sys.argv:
    time.sleep(600)
"""


def member(name: str, kind: bytes = tarfile.REGTYPE, content: str = "", target: str = "") -> None:
    """Adds a file or a link."""
    info = tarfile.TarInfo(f"engine-{version}/{name}")
    info.type, info.linkname, info.size = kind, target, len(content.encode())
    info.mode = 0o755 if content.startswith("#!") else 0o644
    archive.addfile(info, io.BytesIO(content.encode()))


with tarfile.open(path, "w:xz") as archive:
    member("bin/server", content=PROGRAM)
    member("lib/kernels.so.7", content=f"for sm_70, {version}")
    member("lib/kernels.so", tarfile.SYMTYPE, target="kernels.so.7")
    if bad:
        member("lib/out.so", tarfile.SYMTYPE, target="../../../../etc/passwd")
print(hashlib.sha256(Path(path).read_bytes()).hexdigest())
