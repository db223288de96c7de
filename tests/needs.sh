#!/bin/sh
# Installs what the tests between hosts, with batch systems and in a browser need of the system: as root on Debian or Ubuntu.
# Elsewhere says what is missing.
set -eu
PATH="$PATH:/usr/sbin:/sbin"
missing=""
for need in ip:iproute2 iptables:iptables unshare:util-linux hostname:hostname sshd:openssh-server ssh:openssh-client \
    slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client mpiexec.openmpi:openmpi-bin mpiexec.mpich:mpich chromium:chromium \
    chromedriver:chromium-driver kubectl:kubernetes-client g++:g++; do
    command -v "${need%:*}" >/dev/null || missing="$missing ${need#*:}"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq || true
    # shellcheck disable=SC2086 # one word for each package
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null && exit 0
fi
echo "Tests between hosts, with batch systems and in a browser are skipped without:$missing. To install: sudo apt-get install$missing" >&2
