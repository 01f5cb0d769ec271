#!/usr/bin/env bash
# Debian's SLURM, unpacked into build/slurm and not installed: with srun on the PATH, other programs
# would take this machine for a cluster. Needs root and apt; about 3 MB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x build/slurm/usr/bin/srun ] && exit
packages=(slurmctld slurmd slurm-client munge)

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "SLURM is not fetched: that needs root and apt (Debian, Ubuntu)" >&2
  exit
fi
archives=$(mktemp -d)
trap 'rm -rf "$archives"' EXIT
mkdir "$archives/partial"
if ! { apt-get update -qq && apt-get install -qq -y --no-install-recommends --download-only \
  -o Dir::Cache::archives="$archives" "${packages[@]}"; }; then
  echo "SLURM is not fetched: apt could not get ${packages[*]}" >&2
  exit
fi
rm -rf build/slurm.part && mkdir -p build/slurm.part
for package in "$archives"/*.deb; do dpkg -x "$package" build/slurm.part; done
rm -rf build/slurm && mv build/slurm.part build/slurm
