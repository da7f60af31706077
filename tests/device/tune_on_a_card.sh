#!/bin/bash
# Builds an engine on a machine with a card by the role's own script, makes a model of 27B shape with random weights meanwhile, and
# tunes it against an exhaustive grid. It only reads the card's settings. Needs no network; in the checkout's root:
#   bash tests/device/tune_on_a_card.sh DIR OUT SECONDS STAGE...        DIR as `python -m tests.device.tune_inputs DIR` wrote it
# Stages: grid (one more pass over every point), tune, mmq (a second build without FORCE_MMQ, and both in turn).
# A second run on the same machine finds engine, model and measurements, and goes on.
set -u
inputs=$1 out=$2 seconds=$3
shift 3
mkdir -p "$out"
exec > >(tee -a "$out/run.log") 2>&1
script=roles/llama_cpp/files/build_release.py
keep=/var/tmp/tune-on-a-card model=/var/tmp/made-27b.gguf
say() { echo "== $SECONDS s: $*"; }
field() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$@"; }
release_of() { echo "/opt/v100ctl/engines/llama_cpp/$(field "$1" build_id)"; }
export PYTHONPATH=$PWD/src:$PWD
nvidia-smi --query-gpu=name,driver_version,power.limit,clocks.max.sm,clocks.max.mem,memory.total --format=csv

# Builds what a specification says, unless it is there.
build() {
    local spec=$1 id work release
    id=$(field "$spec" build_id)
    work=/var/lib/v100ctl/build/$id release=$(release_of "$spec")
    [ ! -d "$release" ] || return 0
    say "build $id"
    python3 -B $script start --spec "$spec" --archive "$inputs/source.tar.gz" --work "$work" || return 1
    while :; do
        python3 -B $script status --work "$work" >"$out/status.json"
        [ "$(field "$out/status.json" state)" = running ] || break
        sleep 1
    done
    say "$(field "$out/status.json" message)"
    [ "$(field "$out/status.json" state)" = "done" ] || { tail -20 "$work/build.log"; return 1; }
    python3 -B $script install --archive "$work/release.tar.gz" --sha256 "$(field "$out/status.json" sha256)" --release "$release"
}

for name in cmake ninja; do
    [ -e /usr/bin/$name ] || ln -s "$(readlink -f "$(command -v $name)")" /usr/bin/$name
done
if ! ldconfig -p | grep -q 'libcuda.so.1 '; then
    found=$(find / -xdev -name libcuda.so.1 -not -path '*/compat/*' -not -path '*/stubs/*' 2>/dev/null | head -1)
    [ -z "$found" ] || { dirname "$found" >/etc/ld.so.conf.d/zz-driver.conf && ldconfig; }
fi
if [ ! -e $model ]; then
    (python3 -m tests.device.made_weights qwen35-27b $model.new && mv $model.new $model && say model) &
    model_writer=$!
fi
build "$inputs/spec.json" || exit 1
[ -z "${model_writer:-}" ] || wait "$model_writer"
stages=()
for stage in "$@"; do
    if [ "$stage" = mmq ]; then
        build "$inputs/spec-without-mmq.json" || exit 1
        stage=mmq:$(release_of "$inputs/spec-without-mmq.json")
    fi
    stages+=("$stage")
done
say "${stages[*]}"
python3 -m tests.device.tune_on_a_card "$inputs" $keep $model $((seconds - SECONDS)) "${stages[@]}"
cp $keep/*.json* $keep/*.svg $keep/*.log "$out" 2>/dev/null
say end
