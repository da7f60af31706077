"""Whether a release of vLLM works here: imports it, looks for machine code, has it read a command line, builds its web server.

Run by the release's own Python. Arguments: the architectures that have to be there (``sm_70``). No card is needed. The last line
of the output is one JSON object.
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path


def architectures(library: Path) -> "set[str]":
    """What a library holds machine code for, by the `cuobjdump` that comes with Triton."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return set()
    program = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run([str(program), "--list-elf", str(library)], stdout=subprocess.PIPE, check=True)
    return set(re.findall(r"\.(sm_\d+a?)\.", done.stdout.decode("ascii", "replace")))


def own_libraries() -> "list[Path]":
    """The kernels of vLLM, and of xformers, which computes its attention on cards without tensor cores of the newer kind."""
    found = []
    for package, pattern in (("vllm", "_C*.so"), ("xformers", "_C.so")):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            found += sorted(Path(spec.origin).parent.glob(pattern))
    return found


def web_server_problem() -> str:
    """Why the web server cannot be put together, empty where it can."""
    from vllm.entrypoints.openai import api_server

    routes = {getattr(route, "path", "") for route in api_server.router.routes}
    missing = {"/health", "/v1/models", "/v1/chat/completions"} - routes
    return "its server has no " + ", ".join(sorted(missing)) if missing else ""


def main(wanted: "list[str]") -> int:
    """The program; returns its exit status."""
    import torch

    # The list of the library itself: `torch.cuda.get_arch_list()` is empty without a card.
    found = torch._C._cuda_getArchFlags().split()
    for what, held in (("PyTorch", set(found)), *((path.name, architectures(path)) for path in own_libraries())):
        missing = sorted(set(wanted) - held)
        if missing:
            sys.stderr.write(
                "its {} has machine code for {}, none for {}\n".format(what, " ".join(sorted(held)), " ".join(missing))
            )
            return 1
    import read_arguments
    import vllm

    read_arguments.read(["--model", "/nowhere", "--port", "8000"])
    problem = web_server_problem()
    if problem:
        sys.stderr.write(problem + "\n")
        return 1
    said = {"version": vllm.__version__, "torch": torch.__version__, "cuda": torch.version.cuda, "architectures": found}
    sys.stdout.write(json.dumps(said) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
