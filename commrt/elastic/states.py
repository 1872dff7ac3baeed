# SPDX-License-Identifier: Apache-2.0
"""The state that a loop works with: one for the whole run, or one for each change.

Objects that hold process groups cannot outlive these. So a program may give a function
that makes its state: it is called again after each change, and what is made gets the
state of what was there before.
"""

from __future__ import annotations

from collections.abc import Callable

from commrt.comm import Communicator
from commrt.elastic.state import Kept, State
from commrt.errors import UsageError, shown

__all__ = ["Build", "Built", "Given"]

Build = Callable[[Communicator], State]


class Given:
    """One state, which all communicators of a run have in turn."""

    def __init__(self, state: State) -> None:
        self.state = state

    def steps(self, done: int) -> tuple[int, ...]:
        """Return at the begin of which steps this rank can be."""
        return self.state.steps(done)

    def arrays(self) -> tuple[str, ...]:
        """Return a line for each array, to be compared with other ranks'."""
        return tuple(self.state.descriptions())

    def undo(self, done: int) -> None:
        """Undo the step that fails, if one has begun."""
        self.state.undo(done)

    def leave(self, done: int) -> None:
        """Do nothing: the state stays while the ranks change."""

    def make(self, comm: Communicator, step: int) -> None:
        """Return to where a step began, if this rank can."""
        self.state.return_to(step)


class Built:
    """A state that a function makes anew after each change."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._made: State | None = None
        self._kept: Kept | None = None
        """Copies of the last state, while there is none."""

    @property
    def state(self) -> State:
        """The state that was made last."""
        assert self._made is not None
        return self._made

    def steps(self, done: int) -> tuple[int, ...]:
        """Return at the begin of which steps this rank can be."""
        if self._made is not None:
            return self._made.steps(done)
        # Before the first one is made, all ranks are at the begin.
        return (done,) if self._kept is None else tuple(self._kept.entries)

    def arrays(self) -> None:
        """Return None: the next state is not made yet."""
        return None

    def undo(self, done: int) -> None:
        """Keep what was when the step began that fails, for the state to come."""
        self.leave(done)

    def leave(self, done: int) -> None:
        """Keep the state for the one to come, and drop what holds it."""
        if self._made is not None:
            self._kept, self._made = self._made.kept(done), None

    def make(self, comm: Communicator, step: int) -> None:
        """Make the state of these ranks as a step begins, if this rank can.

        Collective where the function is.
        """
        made = self._build(comm)
        if not isinstance(made, State):
            raise UsageError(
                f"elastic.run: the function that makes the state returned "
                f"{shown(made)}; expected a commrt.elastic.State"
            )
        if self._kept is not None:
            made.inherit(self._kept, step)
        self._made, self._kept = made, None
