"""Makes small wheels that stand in for vLLM, PyTorch and Triton, and requirements files with their hashes.

Argument: a new folder. In it: ``wheels/`` and ``requirements.txt``; ``other/`` and ``other.txt`` with a PyTorch without
machine code for a V100; ``changed/`` with one wheel that is not the one that was locked.
"""

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

TORCH = """
import os, time, types
__version__ = "2.6.0+toy"
version = types.SimpleNamespace(cuda="12.4")
_C = types.SimpleNamespace(_cuda_getArchFlags=lambda: "@ARCHITECTURES@")
while os.path.exists("/run/toy-slow"):
    time.sleep(0.1)
"""
CLI_ARGS = """
def make_arg_parser(parser):
    parser.add_argument("--model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--enforce-eager", action="store_true")
    return parser
"""
API_SERVER = """
import types
paths = ("/health", "/v1/models", "/v1/chat/completions")
router = types.SimpleNamespace(routes=[types.SimpleNamespace(path=path) for path in paths])
"""
CUOBJDUMP = """#!/bin/sh
echo "ELF file    1: _C.1.sm_70.cubin"
"""


def wheel(folder, name, files, scripts=""):
    """One wheel; its SHA-256."""
    info = f"{name}-1.0.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nLicense: MIT\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: toy\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if scripts:
        files[f"{info}/entry_points.txt"] = scripts
    path = folder / f"{name}-1.0-py3-none-any.whl"
    lines = []
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            # A fixed time: the same content is the same wheel.
            member = zipfile.ZipInfo(file, (2024, 1, 1, 0, 0, 0))
            member.external_attr = (0o100755 if "/bin/" in file else 0o100644) << 16
            archive.writestr(member, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
            lines.append(f"{file},sha256={digest},{len(content.encode())}\n")
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD", (2024, 1, 1, 0, 0, 0)), "".join(lines) + f"{info}/RECORD,,\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wheels(folder, architectures, greeting=""):
    """All of them; a requirements file's lines."""
    folder.mkdir(parents=True)
    hashes = {
        "torch": wheel(folder, "torch", {"torch/__init__.py": TORCH.replace("@ARCHITECTURES@", architectures)}),
        "triton": wheel(folder, "triton", {"triton/__init__.py": "", "triton/backends/nvidia/bin/cuobjdump": CUOBJDUMP}),
        "vllm": wheel(
            folder,
            "vllm",
            {
                "vllm/__init__.py": f"{greeting}__version__ = '1.0'\n",
                "vllm/_C.abi3.so": "code",
                "vllm/main.py": "def main():\n    print('toy vllm')\n",
                "vllm/utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser\n",
                "vllm/entrypoints/__init__.py": "",
                "vllm/entrypoints/openai/__init__.py": "",
                "vllm/entrypoints/openai/api_server.py": API_SERVER,
                "vllm/entrypoints/openai/cli_args.py": CLI_ARGS,
            },
            "[console_scripts]\nvllm = vllm.main:main\n",
        ),
    }
    return "".join(f"{name}==1.0 \\\n    --hash=sha256:{digest}\n" for name, digest in hashes.items())


def main(arguments):
    """The program; returns its exit code."""
    folder = Path(arguments[0])
    lock = wheels(folder / "wheels", "sm_70 sm_80")
    (folder / "requirements.txt").write_text(lock, encoding="utf-8")
    (folder / "other.txt").write_text(wheels(folder / "other", "sm_80"), encoding="utf-8")
    wheels(folder / "changed", "sm_70 sm_80", greeting="print('not what was locked')\n")
    # An index on the host itself; the locked hashes, the changed wheels.
    (folder / "changed.txt").write_text("--no-index\n--find-links /srv/changed\n" + lock, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
