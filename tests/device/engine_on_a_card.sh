#!/bin/bash
# Builds an engine on a machine with a card by the role's own script, installs it, serves a made model from it with all layers on the
# card, and looks at it with the probe. It only reads the card's settings. Needs no network; run it in the checkout's root:
#   bash DIR/engine_on_a_card.sh DIR OUT        DIR as `python -m tests.device.engine_inputs DIR` wrote it; OUT gets logs and JSON
set -u
inputs=$1 out=$2
mkdir -p "$out"
exec > >(tee "$out/run.log") 2>&1
script=roles/llama_cpp/files/build_release.py
say() { echo "== $SECONDS s: $*"; }
field() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$@"; }

say machine
nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used --format=csv
# The build takes its programs from the system's folders alone.
for name in cmake ninja; do
    [ -e /usr/bin/$name ] || ln -s "$(readlink -f "$(command -v $name)")" /usr/bin/$name
done
# An image may have the driver's library where the loader does not look.
if ! ldconfig -p | grep -q 'libcuda.so.1 '; then
    found=$(find / -xdev -name libcuda.so.1 -not -path '*/compat/*' -not -path '*/stubs/*' 2>/dev/null | head -1)
    [ -z "$found" ] || { dirname "$found" >/etc/ld.so.conf.d/zz-driver.conf && ldconfig; }
fi

id=$(field "$inputs/spec.json" build_id)
work=/var/lib/v100ctl/build/$id
release=/opt/v100ctl/engines/llama_cpp/$id
say "build $id"
python3 -B $script start --spec "$inputs/spec.json" --archive "$inputs/source.tar.gz" --work "$work" || exit 1
while :; do
    python3 -B $script status --work "$work" >"$out/status.json"
    [ "$(field "$out/status.json" state)" = running ] || break
    sleep 2
done
cp "$work/build.log" "$out/"
say "$(field "$out/status.json" message)"
[ "$(field "$out/status.json" state)" = "done" ] || exit 1

say install
python3 -B $script install --archive "$work/release.tar.gz" --sha256 "$(field "$out/status.json" sha256)" --release "$release" || exit 1
cp "$release/release.json" "$out/"
du -sh "$release"
say "libraries in an empty environment"
env -i /usr/bin/ldd "$release/lib/libggml-cuda.so.0" | grep -E 'cuda|cublas'
env -i "$release/bin/llama-server" --version

say model
python3 - <<'PY'
from pathlib import Path

from tests.device import shapes

shapes.write(shapes.MODELS["qwen3-8b"](), Path("/tmp/model.gguf"), tokens=True)
PY
python3 - "$inputs/instance.json" /tmp/argv.json <<'PY'
import json
import os
import sys

words = json.load(open(sys.argv[1]))["argv"]
words[words.index("--model") + 1] = "/tmp/model.gguf"
for name in ("--threads", "--threads-batch"):
    words[words.index(name) + 1] = str(len(os.sched_getaffinity(0)))
json.dump(words, open(sys.argv[2], "w"))
print(" ".join(words))
PY

say serve
python3 -c 'import json, os; w = json.load(open("/tmp/argv.json")); os.execve(w[0], w, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0", "CUDA_MODULE_LOADING": "LAZY"})' >"$out/server.log" 2>&1 &
server=$!
for _ in $(seq 120); do
    curl -fsS http://127.0.0.1:8000/health 2>/dev/null && break
    kill -0 $server 2>/dev/null || { tail -20 "$out/server.log"; exit 1; }
    sleep 1
done
curl -fsS http://127.0.0.1:8000/completion -H 'Content-Type: application/json' \
    -d '{"prompt":[5,6,7,8,9,10,11,12],"n_predict":64,"ignore_eos":true,"cache_prompt":false}' >"$out/completion.json"
nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv
python3 -B src/v100ctl/probe/host_script.py --request '{}' >"$out/probe.json"
kill $server

say "what the plan asks of the log"
python3 - "$inputs/instance.json" "$out/server.log" "$out/completion.json" <<'PY'
import json
import re
import sys

proof = json.load(open(sys.argv[1]))["proof"]
lines = open(sys.argv[2], errors="replace").read().splitlines()
for kind in ("must_log", "must_not_log"):
    for pattern in proof[kind]:
        print(kind, repr(pattern), "->", next((line for line in lines if re.search(pattern, line)), None))
print(json.load(open(sys.argv[3]))["timings"])
PY
say end
