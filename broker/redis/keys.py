"""Every key that a run has in Redis. All of a run begin with `slipstream:{RUN}:`, so one ACL pattern covers them and a
Redis Cluster keeps them in one slot; those of one store begin with `slipstream:{RUN}:STORE:`.

    slipstream:runs                  set     names of the runs on this server, for `--join` without ?run=NAME
    slipstream:{RUN}:run             string  Pointer as JSON: which store is the run's now, and whose run it is

    PREFIX state                     hash    scalars: see STATE below
    PREFIX tasks                     hash    serial -> record of a living task (MessagePack array, see delivery.lua)
    PREFIX bodies                    hash    serial -> encoded common.rollouts.Task of a living task
    PREFIX pending, ready            zset    serials of that state, scored by themselves
    PREFIX leases                    zset    token -> deadline in ms; a token is SERIAL.NONCE
    PREFIX steps                     hash    uncommitted step -> [groups that passed their place on, [serials in order]]
    PREFIX passed                    zset    serials that passed their place on, from the oldest living task on
    PREFIX remembered                zset    TOKEN|NODE of the newest accepted results whose record is gone
    PREFIX p:TOKEN:NONCE             string  payload of a group, set just before its `complete`
    PREFIX recorded, recorded_steps  hash, zset  committed steps whose groups are kept (broker.retain_steps)
    PREFIX ledger                    string  finished tasks, appended: 4 bytes length, then a MessagePack array
    PREFIX events                    stream  the newest BrokerEvents; entry N-0 has index N - 1
    PREFIX node:ID                   hash    report, pid, host, version, in_doubt, leased, handed (tokens), wt:*, ws:*
    PREFIX seen, gone                zset    living, silent nodes -> when they were last seen, in ms
    PREFIX waiting                   zset    NONCE:NODE of lease requests that wait -> until when, in ms
    PREFIX wake:NONCE                list    pushed to when the request that waits under NONCE may be served
    PREFIX replaced                  set     fenced learner processes of the current incarnation

STATE: store, lost (why the store may not be used any more), run (RunInfo as JSON), pid (of the keeper), the run's
numbers (b, k, max_attempts, lease_ms, max_lease_ms, max_bytes, retain), epoch, next, committed, first_step, wanted,
passed_gone (how many of `passed` were forgotten), bytes, acc_groups, acc_bytes, tick, due, taker, taker_needs,
offer_nonce, offer_new, learner (report as JSON) and l_*,
and counters: events, dead, committed_groups, filtered, expiries, stale, past_generated. Fields wt:REASON and ws:REASON
are tokens and seconds of waste: under a node what the broker counted, in `state` those of nodes that are gone.
"""

from urllib.parse import quote

import msgspec

RUNS = b"slipstream:runs"


class Pointer(msgspec.Struct, frozen=True):
    """Which store a run has, and whose run it is."""

    store: str
    run_dir: str


def run_prefix(run: str) -> str:
    """What all keys of a run begin with; other characters than letters, digits and `_.-~` are percent-encoded."""
    return f"slipstream:{{{quote(run, safe='')}}}:"


def pointer_key(run: str) -> bytes:
    """Of the run's Pointer."""
    return f"{run_prefix(run)}run".encode()


class Keys:
    """Names of one store's keys."""

    def __init__(self, run: str, store: str) -> None:
        self.store = store
        self._prefix = f"{run_prefix(run)}{store}:".encode()
        self.state = self.of("state")

    def of(self, name: str) -> bytes:
        """The key `name` of this store."""
        return self._prefix + name.encode()

    @property
    def all_payloads(self) -> bytes:
        """Pattern of all payload keys; nothing in a prefix has a meaning in patterns."""
        return self._prefix + b"p:*"

    def payload_name(self, key: bytes) -> bytes:
        """TOKEN:NONCE of a payload's key."""
        return key[len(self._prefix) + 2 :]

    def payload(self, name: bytes) -> bytes:
        """The key of a payload; `name` is TOKEN:NONCE."""
        return self._prefix + b"p:" + name
