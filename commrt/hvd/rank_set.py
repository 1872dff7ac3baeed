# SPDX-License-Identifier: Apache-2.0
"""One process set at work: its rounds, its buckets, and what is on its way."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence

from commrt.comm import Communicator
from commrt.errors import CommError, MismatchError, RefusedError, TimeoutError_
from commrt.hvd.adasum import Adasum
from commrt.hvd.agreement import Agreement
from commrt.hvd.buckets import Bucket, Buckets, Part
from commrt.hvd.entries import Entry, UnderWay, zeros_for
from commrt.hvd.negotiation import Complete, Negotiation, Outcome
from commrt.hvd.signatures import Signature, differences, ranks_text
from commrt.hvd.transfers import AVERAGE, TRANSFERS, Transfer
from commrt.request import Request

__all__ = ["RankSet"]

_WITH_ZEROS = ("", "sum", AVERAGE)
"""Reductions in which a rank that has joined may take part with zeros."""


class RankSet:
    """The ranks of a process set, as the member that this rank is sees them.

    It has two communicators of its own, so its collectives meet no others. Nothing
    runs by itself: ``advance`` does what can be done, and never waits.

    Args:
        comm: over the ranks; it stays the caller's.
        ranks: the ranks' numbers in the communicator of all ranks.
        name: of its communicators, as logs show it.
        fusion_nbytes: bytes at which a bucket is closed.
        cache_capacity: names whose signatures are kept.
    """

    def __init__(
        self,
        comm: Communicator,
        ranks: Sequence[int],
        *,
        name: str,
        fusion_nbytes: int,
        cache_capacity: int,
    ) -> None:
        self.ranks = list(ranks)
        self.rank, self.size = comm.rank, comm.size
        self.comm = comm.dup(name=name)
        self._control = comm.dup(name=f"{name}.negotiation")
        self._buckets = Buckets(fusion_nbytes)
        self._negotiation = Negotiation(
            self._control, Agreement(comm.size, cache_capacity)
        )
        self._under_way: dict[UnderWay, None] = {}
        self._closing: list[Entry] = []
        """Entries with tensors in open buckets."""
        self._asks = False
        self._gives_up = ""
        self.joins = False
        """True while this rank is in ``join``."""
        self.last_joined: int | None = None
        """The rank that joined last, once all have; of the ranks of this set."""
        self.num_idle = 0
        """Rounds in a row in which all ranks waited, and nothing came of it."""
        self.num_rounds = 0
        """Rounds that have ended."""
        self.missing: list[tuple[Entry, list[int]]] = []
        """Operations and the ranks they lack, as the latest round with texts said."""
        self.error: CommError | None = None
        """The error that has ended the set; None: it can be used."""

    # -- what is there to do -----------------------------------------------------

    def submit(self, entry: Entry) -> None:
        """Take an operation; local, and returns at once."""
        self._negotiation.submit(entry)

    @property
    def is_settled(self) -> bool:
        """True if all that this rank has submitted is under way, or over."""
        return self._negotiation.is_empty and self._buckets.is_empty

    @property
    def has_news(self) -> bool:
        """True if there are operations that no round has seen."""
        return self._negotiation.has_news

    @property
    def round_request(self) -> Request | None:
        """The collective of the round that is under way; None: there is none."""
        return self._negotiation.request

    def ask(self) -> None:
        """Let the next round find out which ranks are missing."""
        self._asks = True

    def give_up(self, why: str) -> None:
        """Let the next round end all operations that are not complete, on all ranks."""
        self._gives_up = why

    # -- doing it ----------------------------------------------------------------

    def advance(self, *, waits: bool) -> None:
        """Do what can be done without waiting; start at most one round.

        Args:
            waits: whether this rank waits, so that it can submit nothing more now.
        """
        if self.error is not None:
            return
        try:
            self._advance(waits)
        except CommError as error:
            self.end(error)

    def _advance(self, waits: bool) -> None:
        self._step()
        if self._negotiation.request is None and self._wants_round(waits):
            self._negotiation.start(
                waits=waits,
                joins=self.joins,
                asks=self._asks,
                gives_up=self._gives_up,
            )
            self._asks, self._gives_up = False, ""
            self._step()
        while self._under_way:
            first = next(iter(self._under_way))
            if not first.test():
                break
            first.finish()
            del self._under_way[first]

    def _step(self) -> None:
        outcome = self._negotiation.step()
        if outcome is not None:
            self._conclude(outcome)

    def _wants_round(self, waits: bool) -> bool:
        if waits:
            return self.joins or not self.is_settled
        # Shorter news would fill no bucket: they can go with a later round.
        nbytes = self._negotiation.news_nbytes
        return nbytes > 0 and nbytes >= self._buckets.fusion_nbytes

    def _conclude(self, outcome: Outcome) -> None:
        """Start what a round has found complete, in the same order on all ranks."""
        self.num_rounds += 1
        is_idle = outcome.all_wait and self._buckets.is_empty
        is_idle = is_idle and not outcome.complete and not outcome.had_news
        self.num_idle = self.num_idle + 1 if is_idle else 0
        for found in outcome.complete:
            self._take(found, outcome.joined)
        if outcome.all_wait:
            # Nobody can submit more before something ends, so what is there must go.
            for bucket in self._buckets.close():
                self._start(bucket)
        if outcome.had_news:
            self.missing = outcome.missing
        if outcome.why_given_up or self.joins:
            # There is nothing left that this rank could mean, or others are at work.
            self._gives_up = ""
        if outcome.given_up:
            error = TimeoutError_(self.told_missing(outcome.why_given_up))
            for entry in outcome.given_up:
                entry.fail(error)
        if outcome.last_joined is not None:
            self.last_joined = outcome.last_joined
            self.joins = False

    def _take(self, found: Complete, joined: Collection[int]) -> None:
        """Put the tensors of a complete operation into buckets."""
        entry = found.entry
        error = self._fault(found, joined)
        if error is not None:
            if entry is not None:
                entry.fail(error)
            return
        if entry is None:
            signature = next(iter(found.signatures.values()))
            entry = zeros_for(found.key, signature)
        entry.is_agreed = True
        for number in range(len(entry.inputs)):
            bucket = self._buckets.add(Part(entry, number, found.signatures))
            if bucket is not None:
                self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        signature = bucket.parts[0].entry.signature
        kind: type[Transfer] = TRANSFERS[signature.kind]
        if signature.op == Adasum.name:
            kind = Adasum
        transfer = kind(bucket, self.comm)
        transfer.start()
        self._under_way[transfer] = None

    @property
    def under_way(self) -> list[UnderWay]:
        """Transfers that have been started, and not been finished here."""
        return list(self._under_way)

    def finish_all(self, timeout_s: float | None = None) -> None:
        """Wait for everything that is under way."""
        for transfer in self.under_way:
            transfer.finish(timeout_s)
        self.forget(self.under_way)

    def forget(self, transfers: Iterable[UnderWay]) -> None:
        """Let go of transfers that have been finished, and of their tensors."""
        for transfer in transfers:
            self._under_way.pop(transfer, None)

    # -- what goes wrong ---------------------------------------------------------

    def end(self, error: CommError) -> None:
        """End the set: everything that is not over fails with this error.

        Ranks that come later are told: its communicators are revoked.
        """
        if self.error is None:
            self.error = error
            for comm in (self.comm, self._control):
                with contextlib.suppress(CommError):
                    comm.revoke()
            for entry in self._negotiation.entries():
                entry.fail(error)
            for bucket in self._buckets.close():
                for part in bucket.parts:
                    part.entry.fail(error)

    def _fault(self, found: Complete, joined: Collection[int]) -> CommError | None:
        """Return the error of an operation that is complete; None: it can go."""
        named = {self.ranks[rank]: each for rank, each in found.signatures.items()}
        name = found.key if found.entry is None else found.entry.name
        refused = {rank: each.refusal for rank, each in named.items() if each.refusal}
        if refused:
            rank, why = next(iter(refused.items()))
            return RefusedError(
                f"{name}: {ranks_text(refused)} refused the call, so no rank makes it: "
                f"on rank {rank}: {why}"
            )
        told = differences(named)
        if told:
            return MismatchError(
                f"{name}: the ranks have submitted different operations under this "
                f"name; make them equal:\n{told}"
            )
        lacking = [self.ranks[rank] for rank in joined if rank not in found.signatures]
        return self._fault_of_joined(name, named, lacking)

    def _fault_of_joined(
        self, name: str, named: dict[int, Signature], joined: list[int]
    ) -> CommError | None:
        signature = next(iter(named.values()))
        kind = Entry(name, signature).kind
        if not joined or (kind.takes_zeros and signature.op in _WITH_ZEROS):
            return None
        what = f"{kind.name} with op={signature.op}" if signature.op else kind.name
        return MismatchError(
            f"{name}: {ranks_text(joined)} called join() and can only add zeros to "
            f"sums and averages, not take part in {what}; call join() after it on all "
            f"ranks"
        )

    def told_missing(self, why: str) -> str:
        """Return a message about operations of this rank, and the ranks they lack."""
        lines = [
            f"  {entry.name} ({entry.signature.kind}): not submitted by "
            f"{ranks_text(self.ranks[rank] for rank in ranks)}"
            for entry, ranks in self.missing[:8]
        ]
        if len(self.missing) > 8:
            lines.append(f"  and {len(self.missing) - 8} more")
        return "\n".join(
            [
                f"{why}; operations wait for ranks that have not submitted them. "
                f"Submit each on all ranks of its process set, or call join():",
                *lines,
            ]
        )

    def free(self) -> None:
        """Free its communicators; local."""
        for comm in (self.comm, self._control):
            comm.free()
