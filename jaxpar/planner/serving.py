"""What requests see of a step's time: the wait, the time to the first token, and the time between tokens.

Requests come and go at random, and whenever one ends another begins. Of a replica with B of them, that prefills one
prompt at a time in t seconds and decodes all in steps of d seconds (output of O tokens, the first one from prefill):

    cycle       B t + (O-1) d             in which every lane serves one request
    tokens/s    B O / cycle
    TPOT        d + (B-1) t / (O-1)       the prefills of the others stand between two tokens
    queue       r t / 2(1-r) + d/2        r = (B-1) t / cycle

The queue is that of a server with deterministic service and vacations (Levy and Yechiali, 1975): a prompt waits for
the prefills before it, and for half of the decode step that is running. r is the load of the others, since who arrives
in a closed system finds it without himself. Alone nobody waits.

Pools that prefill only have no decode steps to wait for. A prompt goes to the first of c replicas that is free:

    queue       r^(sqrt(2(c+1))-1) / c(1-r) t/2        (Sakasegawa, 1977; half of it, as service is deterministic)
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class FirstToken:
    """Seconds to the first token: waiting, prefill, and moving the cache to the devices that decode."""

    queue: float
    prefill: float
    transfer: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.queue + self.prefill + self.transfer


@dataclass(frozen=True)
class Served:
    """What a deployment gives: `rate` requests a second, and for each of them these times in seconds.

    `prefilling` is the share of a replica's time that goes into prefills.
    """

    rate: float
    first: FirstToken
    tpot: float
    prefilling: float


def together(prefill: float, interval: float, decode: float, output: int, lanes: int, requests: int) -> Served:
    """Replicas that prefill and decode, with up to `lanes` requests on each, `requests` in all.

    Args:
        prefill: seconds of one prompt from its first chunk to its first token.
        interval: seconds for which it keeps a replica busy; with stages of a pipeline less.
        decode: seconds of a step that gives every request a token.
        output: tokens of a request.
        lanes: requests on the fullest replica.
        requests: on all of them.
    """
    steps = output - 1
    cycle = lanes * interval + steps * decode
    others = (lanes - 1) * interval / cycle
    running = decode / 2 if steps else 0.0
    queue = others * interval / (2 * (1 - others)) + running if lanes > 1 else 0.0
    # Requests of one token have none after which another could come.
    tpot = decode + (lanes - 1) * interval / steps if steps else decode
    return Served(requests / cycle, FirstToken(queue, prefill), tpot, lanes * interval / cycle)


def apart(
    prefill: float,
    interval: float,
    servers: int,
    transfer: float,
    decode: float,
    output: int,
    requests: int,
    most_busy: float,
) -> Served | None:
    """A pool of `servers` replicas that prefill, and a pool that decodes `requests` at once.

    Other arguments as `together` has them; `transfer` seconds move the cache. None where the prompts of so many
    requests would keep the first pool busier than `most_busy`.
    """
    rate = requests / (max(output - 1, 1) * decode + transfer)
    load = rate * interval / servers
    if load > most_busy:
        return None
    queue = load ** (math.sqrt(2 * (servers + 1)) - 1) / (servers * (1 - load)) * interval / 2
    return Served(rate, FirstToken(queue, prefill, transfer), decode, load)
