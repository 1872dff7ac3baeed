# SPDX-License-Identifier: Apache-2.0
"""Creation of an NCCL communicator by all ranks together, or by none.

1. The first member asks NCCL for an id; all members exchange it, their versions and
   their configurations.
2. Each member starts to join, by a call that does not block or in a thread, and polls
   until it has joined or the deadline has come.
3. All members exchange their results. If one failed, all give the communicator up, so
   nobody has a communicator without peers. This is also the barrier that NCCL needs
   before the first collective.
"""

from __future__ import annotations

import json
from typing import Any

from commrt import _native
from commrt.bootstrap.base import Bootstrap
from commrt.errors import BackendError, CommError, MismatchError, UsageError
from commrt.nccl.config import NcclConfig
from commrt.nccl.features import version_text
from commrt.nccl.libnccl import Library
from commrt.nccl.outcomes import IN_PROGRESS, SUCCESS, error_for

__all__ = ["Joining"]

_ABORT_S = 10.0
_GRACE_S = 10.0


class Joining:
    """One rank's part."""

    def __init__(
        self,
        bootstrap: Bootstrap,
        members: list[int],
        config: NcclConfig,
        taken: Library,
        timeout_s: float,
        name: str,
        device: Any = None,
    ) -> None:
        if bootstrap.rank not in members:
            raise UsageError(
                f"{name}: members {members} do not hold this rank {bootstrap.rank}; "
                f"let only members join"
            )
        self._bootstrap = bootstrap
        self._members = members
        self._config = config
        self._native = taken.native
        self._timeout_s = timeout_s
        self._name = name
        self._device = device

    def join(self) -> _native.NcclComm:
        """Return the communicator of NCCL."""
        unique_id, options = self._agree()
        rank = self._members.index(self._bootstrap.rank)
        if self._device is not None:  # NCCL takes the thread's current one
            self._device.make_current(True)
        try:
            made, code = _native.nccl_init(
                *(self._native, len(self._members), rank, unique_id, options),
                self._device,
            )
        finally:
            if self._device is not None:
                self._device.make_current(False)
        try:
            error = self._wait(made, code)
            self._agree_on_success(error)
        except BaseException:
            made.abort(min(self._timeout_s, _ABORT_S))
            raise
        return made

    def _agree(self) -> tuple[bytes, _native.NcclOptions]:
        """Return the id that all have, or raise the same error everywhere."""
        mine: dict[str, Any] = {
            "version": self._native.version,
            "blocking": self._config.blocking,
        }
        options = None
        try:
            options = self._config.options(self._native.version)
        except CommError as error:
            mine["error"] = str(error)
        if self._members[0] == self._bootstrap.rank:
            code, unique_id = self._native.unique_id()
            mine["id"] = unique_id.hex()
            if code != SUCCESS:
                mine["error"] = f"ncclGetUniqueId: {self._native.describe(code)}"
        said = [json.loads(text) for text in self._exchange("id", json.dumps(mine))]
        self._raise_failures([each.get("error", "") for each in said])
        for key, words in (("version", "versions of NCCL"), ("blocking", "blocking=")):
            values = [each[key] for each in said]
            if len(set(values)) > 1:
                raise MismatchError(
                    f"{self._name}: the ranks have different {words}: "
                    + ", ".join(
                        f"rank {rank} "
                        f"{version_text(value) if key == 'version' else value}"
                        for rank, value in zip(self._members, values, strict=True)
                    )
                )
        assert options is not None
        return bytes.fromhex(said[0]["id"]), options

    def _wait(self, made: _native.NcclComm, code: int) -> CommError | None:
        """Wait until NCCL has joined; return what went wrong."""
        if code == IN_PROGRESS:
            code = made.wait(self._timeout_s)
        if code == SUCCESS:
            return None
        return error_for(made, code, "joining", self._name, self._timeout_s)

    def _agree_on_success(self, error: CommError | None) -> None:
        try:
            # Those that joined early wait for those that try until their deadline.
            said = self._exchange(
                "joined", "" if error is None else str(error), _GRACE_S
            )
        except CommError:
            if error is not None:  # whoever is missing here was missing before
                raise error from None
            raise
        if error is not None:
            error.on_all_ranks = True
            raise error
        self._raise_failures(said)

    def _raise_failures(self, said: list[str]) -> None:
        failed = [
            f"rank {rank}: {text}"
            for rank, text in zip(self._members, said, strict=True)
            if text
        ]
        if failed:
            error = BackendError(
                f"{self._name}: not all ranks could make an NCCL communicator, so "
                f"none did: {'; '.join(failed)}"
            )
            error.on_all_ranks = True
            raise error

    def _exchange(self, step: str, text: str, extra_s: float = 0.0) -> list[str]:
        blobs = self._bootstrap.exchange(
            self._members,
            f"nccl/{self._name}/{step}",
            text.encode(),
            self._timeout_s + extra_s,
        )
        return [blob.decode() for blob in blobs]
