"""Prints the toy engine's release, as the plan would give it, for a host with this C library; its source goes into the cache.

Arguments: the host's C library, and one more CMake option as NAME=VALUE or nothing. The cache is the environment's.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

from tests.toy_engine import build_spec, source_files, write_archive
from v100ctl.artifacts import Cache
from v100ctl.artifacts.cache import sha256_file

libc, option = sys.argv[1:]
files = source_files(slow=True)
spec = build_spec(files, libc=libc)
spec["cmake_options"] |= dict([option.split("=")]) if option else {}
spec["build_id"] = "b4711-cpu-" + hashlib.sha256(json.dumps(spec).encode()).hexdigest()[:12]
cache = Cache()
path = cache.source_path(f"tree-{spec['source']['tree_sha256']}")
with tempfile.TemporaryDirectory() as folder, cache.locked(path) as part:
    if not cache.check(path):
        shutil.copyfile(write_archive(Path(folder, "source.tar.gz"), files), part)
        cache.put(part, path, sha256_file(part))
release = {
    "engine": "llama_cpp",
    "build_id": spec["build_id"],
    "path": f"/opt/v100ctl/engines/llama_cpp/{spec['build_id']}",
    "build": spec,
    "toolchain_packages": ["g++", "cmake", "ninja-build"],
}
print(json.dumps(release))
