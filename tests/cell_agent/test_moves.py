"""Calls that move between cells, as the cells' cores see them: one behaviour each, and random histories."""

from collections import Counter, defaultdict

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.cell_agent import commands as do
from services.cell_agent.core import CellCore
from services.cell_agent.roles import Role
from shared import events as ev
from shared.actor import Do, Publish, Wake
from shared.events import Event
from shared.ids import call_of, request_id
from tests.cell_agent.scripted import weights_of
from tests.cell_agent.test_core import UP, ordered, played

EXECUTION = "g000001x00"
RID = request_id(f"{EXECUTION}a1c0001", 1)


def moved(execution: str = EXECUTION, source: int = 0, target: int = 1) -> ev.ExecutionMoved:
    return ev.ExecutionMoved(execution=execution, from_cell=source, to_cell=target, reason="")


def cut(source: int = 0, target: int = 1, lease: str = "l1", incarnation: str = "", rid: str = RID) -> ev.CallCut:
    call, execution = call_of(rid) or ("", "")
    return ev.CallCut(
        rid=rid,
        call=call,
        execution=execution,
        from_cell=source,
        to_cell=target,
        incarnation=incarnation or f"c{source}",
        order=1,
        lease=lease,
        hold_s=15.0,
    )


def adopted(event: ev.CallCut, outcome: str, incarnation: str = "c1") -> ev.CallAdopted:
    return ev.CallAdopted(
        rid=event.rid,
        call=event.call,
        execution=event.execution,
        cell=event.to_cell,
        incarnation=incarnation,
        lease=event.lease,
        outcome=outcome,
    )


def released(event: ev.CallCut, outcome: str) -> ev.CallReleased:
    return ev.CallReleased(
        rid=event.rid,
        execution=event.execution,
        cell=event.from_cell,
        incarnation=event.incarnation,
        lease=event.lease,
        outcome=outcome,
    )


LEAVES = (*UP, moved(), ordered(0, 1, "training"))


def test_the_source_knows_where_its_executions_went():
    core = CellCore(0)
    played(core, *LEAVES, moved("g000002x00", 1, 2))
    assert core.destination(EXECUTION) == 1
    assert core.destination("g000002x00") == -1
    played(core, moved(EXECUTION, 1, 2))
    assert core.destination(EXECUTION) == 2


def test_a_cell_that_is_back_in_rollout_has_moved_nothing():
    core = CellCore(0)
    played(core, *LEAVES, ordered(0, 2, "rollout"))
    assert core.state.role is Role.ROLLOUT
    assert core.destination(EXECUTION) == -1


def test_the_destination_takes_the_pages_in():
    commands, published = played(CellCore(1), *LEAVES, cut())
    assert commands == [do.Adopt(incarnation="c1", cut=cut())]
    assert published == []


def test_a_call_without_pages_is_computed_again():
    commands, published = played(CellCore(1), *LEAVES, cut(lease=""))
    assert commands == []
    assert [(e.outcome, e.rid, e.cell) for e in published] == [("recompute", RID, 1)]


def test_pages_are_not_pulled_into_a_cell_that_leaves_itself():
    commands, published = played(CellCore(1), *LEAVES, ordered(1, 1, "training"), cut())
    assert commands == []
    assert [(e.outcome, e.detail) for e in published] == [("recompute", "cell 1 is draining")]


def test_pages_of_a_lost_source_are_not_asked_for():
    commands, published = played(
        CellCore(1), *LEAVES, ev.CellStarted(cell=0, incarnation="again"), cut(incarnation="c0")
    )
    assert commands == []
    assert [e.outcome for e in published] == ["recompute"]


def test_the_source_lets_go_after_the_destination_s_word():
    for outcome, told in (("pages", "adopted"), ("recompute", "unneeded"), ("failed", "failed")):
        core = CellCore(0)
        commands, _ = played(core, *LEAVES, cut(), adopted(cut(), outcome))
        assert commands == [do.Release(incarnation="c0", rid=RID, execution=EXECUTION, lease="l1", outcome=told)]
        played(core, released(cut(), told))
        assert core.state.moves.leases == {}


def test_the_source_lets_go_when_nobody_says_anything():
    core = CellCore(0)
    played(core, *LEAVES)
    (wake,) = core.handle(cut(), 200.0)
    assert wake == Wake(215.0, f"lease.{RID}")
    fired = ev.TimerFired(service="cell_agent", key=wake.key)
    assert [c.outcome for c in played(core, fired)[0]] == ["expired"]
    assert played(core, adopted(cut(), "pages"))[0] == [], "asked for once"


def test_a_lost_source_tells_that_its_pages_are_gone():
    core = CellCore(0)
    _, published = played(core, *LEAVES, cut(), ev.CellStarted(cell=0, incarnation="again"))
    assert published == [released(cut(), "lost")]


class ScriptedCells:
    """Three cell cores on one stream; the shells' deeds (cut, adopt, let go, die) are the test's."""

    def __init__(self) -> None:
        self.cores = [CellCore(k) for k in range(3)]
        self.log: list[Event] = []
        self.commands: dict[int, list[do.Command]] = defaultdict(list)
        self.timers: dict[int, list[str]] = defaultdict(list)
        self.orders, self.lives, self.calls = Counter[int](), Counter[int](), 0
        for k in range(3):
            self.start(k)

    def publish(self, event: Event) -> None:
        queue = [event]
        while queue:
            self.log.append(queue.pop(0))
            for k, core in enumerate(self.cores):
                for effect in core.handle(self.log[-1], 100.0 + len(self.log)):
                    if isinstance(effect, Publish):
                        queue.append(effect.event)
                    elif isinstance(effect, Wake):
                        self.timers[k].append(effect.key)
                    elif isinstance(effect, Do):
                        self.commands[k].append(effect.command)

    def start(self, k: int) -> None:
        self.lives[k] += 1
        self.commands[k].clear()
        life = f"c{k}-{self.lives[k]}"
        self.publish(ev.CellStarted(cell=k, incarnation=life))
        self.publish(ev.CellTrainerReady(cell=k, incarnation=life, version=0, store="s"))
        self.publish(ev.CellEngineReady(cell=k, incarnation=life, url="u", version=0, capacity=4))
        if k == 0:
            self.publish(weights_of(0, life))

    def leave(self, k: int) -> None:
        for number in range(4):
            self.publish(moved(f"g00000{number}x0{k}", k, (k + 1 + number % 2) % 3))
        self.order(k, "training")

    def order(self, k: int, role: str) -> None:
        self.orders[k] += 1
        self.publish(ordered(k, self.orders[k], role))

    def cut(self, k: int, with_pages: bool) -> None:
        core = self.cores[k]
        if core.state.role not in (Role.DRAINING, Role.JOINING, Role.TRAINING):
            return
        self.calls += 1
        rid = request_id(f"g00000{self.calls % 4}x0{k}a1c{self.calls:04d}", 1)
        target = core.destination((call_of(rid) or ("", ""))[1])
        lease = f"l{self.calls}" if with_pages else ""
        self.publish(cut(k, target, lease, core.state.incarnation, rid))

    def act(self, k: int, outcome: str) -> None:
        if not self.commands[k]:
            return
        command = self.commands[k].pop(0)
        if command.incarnation != self.cores[k].state.incarnation:
            return
        match command:
            case do.Adopt():
                self.publish(adopted(command.cut, outcome, command.incarnation))
            case do.Release():
                of = next(e for e in self.log if isinstance(e, ev.CallCut) and e.rid == command.rid)
                self.publish(released(of, command.outcome))
            case do.Drain():
                fields = {"cell": k, "incarnation": command.incarnation, "order": command.order}
                self.publish(ev.CellDrained(**fields, seconds=0.0))

    def tick(self, k: int) -> None:
        if self.timers[k]:
            self.publish(ev.TimerFired(service="cell_agent", key=self.timers[k].pop(0)))

    def settle(self) -> None:
        for k in range(3):
            while self.timers[k] or self.commands[k]:
                self.act(k, "pages")
                self.tick(k)

    def of(self, kind: type[Event]) -> list[Event]:
        return [e for e in self.log if isinstance(e, kind)]


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["leave", "cut", "cut", "bare", "act", "act", "act", "tick", "die", "back"]),
        st.integers(0, 2),
        st.sampled_from(["pages", "recompute", "failed"]),
    ),
    max_size=80,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(MOVES)
def test_no_lease_stays_and_every_call_is_answered_once(moves):
    world = ScriptedCells()
    for move, k, outcome in moves:
        match move:
            case "leave":
                world.leave(k)
            case "back":
                world.order(k, "rollout")
            case "cut":
                world.cut(k, with_pages=True)
            case "bare":
                world.cut(k, with_pages=False)
            case "act":
                world.act(k, outcome)
            case "tick":
                world.tick(k)
            case "die":
                world.start(k)
    world.settle()
    cuts = {e.rid: e for e in world.of(ev.CallCut)}
    answers = Counter(e.rid for e in world.of(ev.CallAdopted))
    ends = Counter(e.rid for e in world.of(ev.CallReleased))
    assert ends == Counter({rid: 1 for rid, e in cuts.items() if e.lease})
    assert all(core.state.moves.leases == {} for core in world.cores)
    assert all(n == 1 for n in answers.values())
    for rid, event in cuts.items():
        survived = event.to_cell >= 0 and world.lives[event.to_cell] == 1
        assert not survived or rid in answers
