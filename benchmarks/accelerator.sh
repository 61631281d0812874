#!/usr/bin/env bash
# On a host with one GPU, its own torch and no network: install what is missing, build the kernels,
# test them, and measure (benchmarks/accelerator.py says what).
#
#     benchmarks/accelerator.sh --wheels DIR --out DIR [OPTION ...]
#
# DIR of wheels: what `make accelerator-wheels` has filled. Results are in OUT/accelerator.json: a
# second call goes on where the first one's time was over. Further options are those of
# benchmarks.accelerator; `--device cpu` rehearses.
set -euo pipefail
began=$SECONDS wheels='' out='' minutes=9 options=()
while (( $# )); do
    case $1 in
        --wheels) wheels=$(realpath "$2"); shift 2 ;;
        --out) out=$(realpath "$2"); shift 2 ;;
        --minutes) minutes=$2; shift 2 ;;
        *) options+=("$1"); shift ;;
    esac
done
cd "$(dirname "$0")/.."
if [[ ! -d $wheels || -z $out ]]; then
    sed -n '2,10s/^# \{0,1\}//p' benchmarks/accelerator.sh >&2
    exit 2
fi
mkdir -p "$out"
python3 -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
# Into the Python that runs this, from these wheels alone; what it has already stays as it is.
export PIP_BREAK_SYSTEM_PACKAGES=1 PATH="$PATH:$(python3 -m site --user-base)/bin"
pip=(python3 -m pip install --quiet --no-index --find-links "$wheels")
names=()
for file in "$wheels"/*.whl; do
    name=${file##*/}
    names+=("${name%%-*}")
done
"${pip[@]}" "${names[@]}"
"${pip[@]}" --no-build-isolation --editable .
python3 -c 'import sys; from protocol.native import use; v = use().variant; print("kernels", v); sys.exit(v == "torch")'
{ nvidia-smi -L || true; git log -1 --format=%h || true; timeout 60 tsqp doctor || true; } >"$out/host.log" 2>&1
# What installing took is part of the time.
minutes=$(python3 -c "print($minutes - ($SECONDS - $began) / 60)")
python3 -m benchmarks.accelerator --minutes "$minutes" --json "$out/accelerator.json" "${options[@]}" 2>&1 |
    tee "$out/accelerator.log"
