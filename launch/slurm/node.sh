#!/usr/bin/env bash
# One node's part of a job of several nodes; several_nodes.sbatch starts it once on each. Takes the flags of the run.
#
# It finds the address and the network interface by which this node reaches the others, and has everything use them:
# machines have several, and libraries left to themselves choose the wrong one, or loopback. FIRST_NODE and SECOND_NODE
# are two of the nodes. GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME and PET_LOCAL_ADDR are left as they are if they are set.
set -euo pipefail

# The first node looks towards the second and all others towards the first, because the way to itself leads through lo.
peer="$FIRST_NODE"
[ "$SLURM_NODEID" != 0 ] || peer="$SECOND_NODE"
peer_address="$(getent ahostsv4 "$peer" | awk 'NR == 1 { print $1 }')" || true
address="$(ip -4 -oneline route get "${peer_address:-none}" 2>/dev/null | sed -n 's/.* src \([0-9.]*\).*/\1/p')" || true
# Not the interface of the route, which is lo where both nodes are one machine.
interface="$(ip -4 -oneline address show to "${address:-none}/32" 2>/dev/null | awk 'NR == 1 { print $2 }')" || true
if [ -n "$interface" ]; then
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=$interface}" # = for exactly this name
    export PET_LOCAL_ADDR="${PET_LOCAL_ADDR:-$address}"            # torchrun's --local-addr
    echo "zbgrpo: $SLURMD_NODENAME reaches $peer from $address on $interface" >&2
else
    echo "zbgrpo: $SLURMD_NODENAME: no interface found towards $peer; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" >&2
fi

# Who opens the port of the rendezvous is said, not guessed from names (torchrun's --rdzv-conf).
is_host=false
[ "$SLURM_NODEID" != 0 ] || is_host=true
export PET_RDZV_CONF="${PET_RDZV_CONF:+$PET_RDZV_CONF,}is_host=$is_host"
exec bash "$ZBGRPO_REPOSITORY/launch/multinode.sh" "$@"
