#!/usr/bin/env bash
# On a host with one GPU, its own torch and no network: install what is missing, build the kernels,
# test them, and measure (benchmarks/accelerator.py says what).
#
#     benchmarks/accelerator.sh --wheels DIR --out DIR [OPTION ...]
#
# DIR of wheels: what `make accelerator-wheels` has filled. Results are in OUT/accelerator.json, what
# was said in OUT/*.log. Further options are those of benchmarks.accelerator; `--device cpu` rehearses.
set -euo pipefail
cd "$(dirname "$0")/.."
wheels='' out='' options=()
while (( $# )); do
    case $1 in
        --wheels) wheels=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        *) options+=("$1"); shift ;;
    esac
done
if [[ ! -d $wheels || -z $out ]]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
mkdir -p "$out"
python3 -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
# Into the Python that runs it, from these wheels alone; what it has already stays as it is.
pip=(python3 -m pip install --quiet --no-index --find-links "$wheels")
names=()
for file in "$wheels"/*.whl; do
    name=${file##*/}
    names+=("${name%%-*}")
done
"${pip[@]}" "${names[@]}"
"${pip[@]}" --no-build-isolation --editable .
{ nvidia-smi -L || true; git log -1 --format=%h || true; timeout 60 tsqp doctor || true; } >"$out/host.log" 2>&1
cat "$out/host.log"
python3 -m benchmarks.accelerator --json "$out/accelerator.json" "${options[@]}" 2>&1 | tee "$out/accelerator.log"
