#!/usr/bin/env bash
# Pack everything that a GPU machine without network needs: bench/gpu_pack.sh learner|all FILE.tar [PYTHON]
#   learner  for a machine that has torch, transformers and pytest: Megatron and the rest, a few MB
#   all      everything that learner and fleet need beside Python and the driver, several GB
# PYTHON is that machine's version (default 3.12). There, in an empty folder:
#   tar xf FILE.tar && bash install.sh [PYTHON] && bash launch/test.sh gpu
# The archive has the commit that is checked out here, so commit first.
set -euo pipefail
cd "$(dirname "$0")/.."

kind="${1:-}" file="${2:-}" version="${3:-3.12}"
case "$kind" in
  learner)
    names="antlr4-python3-runtime blake3 cffi cryptography einops markdown-it-py mdurl megatron-core megatron-bridge msgspec"
    names="$names omegaconf psutil pycparser pygments pyyaml pyzmq rich xxhash" ;;
  all) names="" ;;
  *) sed -n '2,7s/^# \{0,1\}//p' bench/gpu_pack.sh >&2; exit 2 ;;
esac
[ -n "$file" ] || { echo "gpu_pack: name the archive" >&2; exit 2; }

pack="$(mktemp -d)"
trap 'rm -rf "$pack"' EXIT
mkdir "$pack/wheels"
for name in $names; do
  grep -hE "^$name==" requirements/learner.txt requirements/cpu.txt | head -n 1
done > "$pack/pins.txt"
if [ "$kind" = all ]; then  # Transformer Engine is compiled on the machine itself
  cat requirements/rollout.txt > "$pack/pins.txt"
  grep -E '^(megatron|omegaconf|antlr4|einops)' requirements/learner.txt requirements/cpu.txt -h | sort -u >> "$pack/pins.txt"
fi
platforms=(--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any)
python3 -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: --python-version "$version" \
  "${platforms[@]}" -d "$pack/wheels" -r "$pack/pins.txt"
cat > "$pack/install.sh" <<'SH'
#!/usr/bin/env bash
# Adds the wheels and this repository to the Python named as first argument (default python3), without any index.
set -euo pipefail
cd "$(dirname "$0")"
"${1:-python3}" -m pip install --quiet --no-index --no-deps wheels/*.whl
"${1:-python3}" -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .
SH
git archive --format=tar --output="$pack/source.tar" HEAD
mkdir "$pack/tree" && tar xf "$pack/source.tar" -C "$pack/tree"
mv "$pack/wheels" "$pack/install.sh" "$pack/tree/"
tar cf "$file" -C "$pack/tree" .
du -h "$file"
