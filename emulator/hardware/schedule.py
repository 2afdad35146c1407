"""Which role of a program goes on, and when what is in flight takes effect.

"late": a role runs until it has to wait, and what is asynchronous takes effect only when no role can go on without it.
"random": at every operation another role may go on and anything in flight may take effect, by a seeded generator.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import greenlet

from tilecast.emulator.errors import UnsupportedError
from tilecast.emulator.hardware.barriers import Instance
from tilecast.emulator.hardware.engines import Commit, InFlight, TensorOperation
from tilecast.emulator.hardware.role import Role
from tilecast.emulator.hardware.transfers import Transfer
from tilecast.emulator.session import Session
from tilecast.emulator.trace import Work

#: How often, in random mode, an operation lets another role go first, and something in flight takes effect.
_SWITCH, EFFECT = 0.3, 0.4


class Schedule:
    """The roles of one program and what they have in flight; see the module docstring."""

    def __init__(self, session: Session, number: int) -> None:
        self.session, self.number = session, number
        self.late = session.mode == "late"
        self.random = random.Random((session.seed << 16) + number)
        #: The coroutine that starts the program schedules its roles.
        self.hub = greenlet.getcurrent()
        self.roles: list[Role] = []
        self.current: Role | None = None
        self.copies: list[InFlight] = []
        self.engine: deque[TensorOperation | Commit] = deque()
        #: What the running role computes, of its trace.
        self._segment: Work | None = None
        #: At random moments: index of the role that goes last (one more than there are: none), chosen for so many roles.
        self._lagging = self._counted = 0
        #: Whether other programs go first now.
        self._courteous = False

    def line(self) -> int:
        """Line of the kernel that runs now."""
        return self.session.source.line()

    def role(self) -> Role:
        """The role that runs; UnsupportedError outside a kernel."""
        if self.current is None:
            raise UnsupportedError("a Gluon operation outside a kernel")
        return self.current

    def step(self) -> None:
        """A point where, in random mode, others may go first."""
        if not self.late and self.random.random() < _SWITCH:
            self._switch()

    def step_of_programs(self) -> None:
        """A point where, in random mode, other roles and other programs may go first."""
        self._courteous = self.session.give_way is not None and self.random.random() < _SWITCH
        if self._courteous:
            self._switch()
        else:
            self.step()

    def _switch(self) -> None:
        segment, self._segment = self._segment, None
        self.hub.switch()
        self._segment = segment

    def block(self, condition: Callable[[], bool]) -> None:
        """The running role waits until ``condition`` holds."""
        role = self.role()
        while not condition():
            role.blocked = condition
            self._switch()
        role.waiting = None

    def poll(self, what: str, condition: Callable[[], bool]) -> None:
        """The running role waits for global memory to change; ``what``: for a message, what it waits for."""
        role = self.role()
        role.polls, role.polls_at = what, self.line()
        self.block(condition)
        role.polls = ""

    # -- who goes on ---------------------------------------------------------------------------------------------------

    def _others_go_on(self) -> bool:
        """Have other programs go on, where a role waits for what one of them may store; False where none can."""
        give_way, roles = self.session.give_way, [role for role in self.roles if not role.done]
        if give_way is None or not any(role.polls for role in roles):
            return False
        return give_way(lambda: any(role.blocked is None or role.blocked() for role in roles))

    def _chosen(self, ready: Sequence[Role]) -> Role:
        """Who goes on next: by chance, but that one role of the program (or none) goes only when no other can.

        A role that lags behind by more than a ring's slots is what a missing wait for it takes.
        """
        if len(self.roles) != self._counted:
            self._counted = len(self.roles)
            self._lagging = self.random.randint(0, self._counted)
        others = [role for role in ready if role.index != self._lagging]
        return self.random.choice(others or ready)

    # -- effects -----------------------------------------------------------------------------------------------------

    def _wanted(self, instances: Sequence[Instance]) -> bool:
        return any(i in r.waiting[0] for r in self.roles if r.waiting and not r.done for i in instances)

    def _forced_effect(self) -> bool:
        """Let one thing in flight take effect: something that a waiting role needs, if there is one."""
        for copy in self.copies:
            if self._wanted(copy.wakes()):
                return self._copy_effect(copy)
        if any(self._wanted(entry.wakes()) for entry in self.engine):
            self.engine.popleft().take_effect()
            return True
        if self.engine:
            self.engine.popleft().take_effect()
            return True
        return self._copy_effect(self.copies[0]) if self.copies else False

    def _transfers(self) -> list[Transfer]:
        return [t for role in self.roles for groups in (role.stores, role.gathers) for t in groups.in_flight()]

    def _random_effect(self) -> bool:
        queues = [role for role in self.roles if any(not entry.done for entry in role.wgmma)]
        choices: list[Any] = [*self.copies, *queues, *self._transfers()]
        if self.engine:
            choices.append(self.engine)
        if not choices:
            return False
        chosen = self.random.choice(choices)
        if isinstance(chosen, InFlight):
            return self._copy_effect(chosen)
        if isinstance(chosen, Transfer):
            chosen.take_effect()
        elif isinstance(chosen, Role):
            next(entry for entry in chosen.wgmma if not entry.done).take_effect()
        else:
            self.engine.popleft().take_effect()
        return True

    def _copy_effect(self, copy: InFlight) -> bool:
        self.copies.remove(copy)
        copy.take_effect()
        return True

    def complete_wgmma(self, role: Role, outstanding: int) -> int:
        """Have all but the last ``outstanding`` products of a role take effect; returns the number of the last done."""
        while len(role.wgmma) > outstanding:
            oldest = role.wgmma.popleft()
            if not oldest.done:
                oldest.take_effect()
            oldest.known_done, oldest.waited_at = True, self.line()
        for left in role.wgmma:
            left.left_by = role.left_by[left.number] = self.line()
        return role.wgmma_issued - len(role.wgmma)
