#!/bin/bash
# Builds an engine on a machine with a card by the role's own script, makes a model of 27B shape with random weights meanwhile, and
# measures it in each configuration of `bench_inputs`. It only reads the card's settings. Needs no network; in the checkout's root:
#   bash tests/device/bench_on_a_card.sh DIR OUT SECONDS        DIR as `python -m tests.device.bench_inputs DIR` wrote it
# A second run on the same machine finds engine and model and goes on with what is not in OUT.
set -u
inputs=$1 out=$2 seconds=$3
mkdir -p "$out"
exec > >(tee -a "$out/run.log") 2>&1
script=roles/llama_cpp/files/build_release.py
say() { echo "== $SECONDS s: $*"; }
field() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$@"; }
export PYTHONPATH=$PWD/src:$PWD
nvidia-smi --query-gpu=name,driver_version,power.limit,clocks.max.sm,clocks.max.mem,memory.total --format=csv
id=$(field "$inputs/spec.json" build_id)
work=/var/lib/v100ctl/build/$id release=/opt/v100ctl/engines/llama_cpp/$id
model=/var/tmp/made-27b.gguf
if [ ! -d "$release" ]; then
    for name in cmake ninja; do
        [ -e /usr/bin/$name ] || ln -s "$(readlink -f "$(command -v $name)")" /usr/bin/$name
    done
    if ! ldconfig -p | grep -q 'libcuda.so.1 '; then
        found=$(find / -xdev -name libcuda.so.1 -not -path '*/compat/*' -not -path '*/stubs/*' 2>/dev/null | head -1)
        [ -z "$found" ] || { dirname "$found" >/etc/ld.so.conf.d/zz-driver.conf && ldconfig; }
    fi
    say "build $id"
    python3 -B $script start --spec "$inputs/spec.json" --archive "$inputs/source.tar.gz" --work "$work" || exit 1
    (python3 -m tests.device.made_weights qwen35-27b $model.new && mv $model.new $model && say model) &
    model_writer=$!
    while :; do
        python3 -B $script status --work "$work" >"$out/status.json"
        [ "$(field "$out/status.json" state)" = running ] || break
        sleep 1
    done
    say "$(field "$out/status.json" message)"
    [ "$(field "$out/status.json" state)" = "done" ] || { tail -20 "$work/build.log"; exit 1; }
    python3 -B $script install --archive "$work/release.tar.gz" --sha256 "$(field "$out/status.json" sha256)" --release "$release" || exit 1
    wait $model_writer
fi
say "a copy on the card, bytes read and written"
python3 - <<'PY'
import torch

one = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
two = torch.empty_like(one)
for _ in range(3):
    two.copy_(one)
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
start.record()
for _ in range(20):
    two.copy_(one)
end.record()
torch.cuda.synchronize()
print(f"{20 * 2 * one.numel() / start.elapsed_time(end) / 1e6:.0f} GB/s")
PY
say measure
python3 -m tests.device.bench_on_a_card "$inputs" "$out" $model $((seconds - SECONDS))
(cd "$out" && tar czf reports.tar.gz ./*.json ./*.log ./*.argv)
say end
