"""Sessions that are interrupted go on from what is durable; tool calls are made once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from agent_cases import CountingTool, Lives

from perdure.agents.loops import ToolAgent
from perdure.core.agent_api import ToolError, ToolKind
from perdure.core.errors import EngineLostError, InfrastructureError
from perdure.core.experience_records import ToolResult
from perdure.core.ids import GroupId, PolicyVersion, SessionId
from perdure.core.record_types import StopReason
from perdure.core.rollout_api import GenerationRequest, SamplingParams
from perdure.experience import GroupState
from perdure.runtime.sessions import SessionRules
from perdure.runtime.tool_calls import ToolRules
from perdure.tasks.api import Prompt, RewardResult
from perdure.tasks.tokenizer import EOS_ID, ByteTokenizer, PieceTokenizer, Tokenizer

FIRST, SECOND = SessionId(GroupId(0), 0), SessionId(GroupId(0), 1)
LONG = "abcdefghijklmnopqrstuvwxyz\x01"
SAMPLING = SamplingParams(max_new_tokens=80, stop_token_ids=(EOS_ID,))
PLAIN = SessionRules(SAMPLING, seed=3, partial_tokens=4, retry_pause_s=0.0)
PIECES = PieceTokenizer(["<tool>", "</tool>", "<result>", "</result>", *map(chr, range(32, 127))])


def talks(request: GenerationRequest, said: str) -> str:
    return LONG


def with_tools(*raises: BaseException, kind: ToolKind = ToolKind.STATELESS, **rules: object):
    tool = CountingTool(*raises, kind=kind)
    changed = {"tools": ToolRules({"calculator": tool}), "loop": ToolAgent(), **rules}
    return tool, replace(PLAIN, **changed)  # type: ignore[arg-type]


def text(lives: Lives, ids: Sequence[int]) -> str:
    return lives.tokenizer.decode(ids)


@pytest.mark.parametrize("partial_tokens", [4, 100])
@pytest.mark.parametrize("policy_version", [0, 1])
def test_a_session_that_was_stopped_goes_on_behind_its_last_token(
    partial_tokens: int, policy_version: int
) -> None:
    lives = Lives(replace(PLAIN, partial_tokens=partial_tokens))
    first = lives.engine(policy=talks, holds=12)
    lives.live(first, cut_short_after=30)
    lives.end_in_order()
    second = lives.engine(policy=talks, version=PolicyVersion(policy_version))
    lives.live(second)
    had = lives.tokenizer.encode(LONG[:12])
    for before, after in zip(first.requests, second.requests, strict=True):
        assert after == replace(before, prefix_ids=had)
    for trajectory in lives.trajectories():
        assert text(lives, trajectory.response_ids_T.tolist()) == LONG[:-1]
        assert trajectory.stop_reason is StopReason.STOP
        assert [s.version for s in trajectory.segments] == [0, 1][: policy_version + 1]
        trajectory.check()


def test_without_warning_what_was_logged_counts() -> None:
    lives = Lives(PLAIN)
    lives.live(lives.engine(policy=talks, holds=12), cut_short_after=30)
    lives.store.flush(1)
    lives.lose_power()
    assert [lives.store.open_group(GroupId(0))] == lives.store.open_groups()
    assert set(lives.store.open_group(GroupId(0)).begun) == {FIRST, SECOND}
    engine = lives.engine(policy=talks)
    lives.live(engine)
    assert {len(request.prefix_ids) for request in engine.requests} == {12}


@pytest.mark.parametrize("rules", [{"partial_tokens": None}, {"continues": False}])
def test_nothing_is_logged_of_unfinished_sessions_if_it_is_not_wanted(rules: dict) -> None:
    lives = Lives(replace(PLAIN, **rules))
    lives.live(lives.engine(policy=talks, holds=12), cut_short_after=30)
    assert lives.store.open_groups()[0].begun == {}


def test_a_run_that_no_longer_continues_starts_its_sessions_again() -> None:
    lives = Lives(PLAIN)
    lives.live(lives.engine(policy=talks, holds=12), cut_short_after=30)
    lives.end_in_order()
    lives.rules = replace(PLAIN, continues=False)
    engine = lives.engine(policy=talks)
    lives.live(engine)
    assert [request.prefix_ids for request in engine.requests] == [(), ()]
    assert lives.state is GroupState.FINISHED


@pytest.mark.parametrize("continues", [True, False])
def test_a_lost_engine_costs_what_it_had_not_given_and_no_sibling(continues: bool) -> None:
    lives = Lives(replace(PLAIN, continues=continues))
    engine = lives.engine(policy=talks, fails=[8])
    lives.live(engine)
    assert lives.state is GroupState.FINISHED
    assert [len(r.prefix_ids) for r in engine.requests] == [0, 0, 8 if continues else 0]
    assert [name for name, _ in lives.events] == ["session_retried"]
    assert all(text(lives, t.response_ids_T.tolist()) == LONG[:-1] for t in lives.trajectories())


def test_a_session_that_fails_too_often_fails_its_group_with_a_reason() -> None:
    lives = Lives(PLAIN)
    lives.live(lives.engine(policy=talks, fails=[8] * 20))
    assert lives.state is GroupState.FAILED
    assert "g0.s0: the engine is gone (attempt 3)" in lives.reason


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), PIECES], ids=["bytes", "pieces"])
def test_what_a_tool_says_is_masked_and_stands_behind_its_call(tokenizer: Tokenizer) -> None:
    tool, rules = with_tools()
    lives = Lives(rules, tokenizer)
    engine = lives.engine()
    lives.live(engine)
    assert [(key.session, key.turn, key.call) for key in tool.calls] == [
        (FIRST, 0, 0),
        (SECOND, 0, 0),
    ]
    for trajectory in lives.trajectories():
        chosen = trajectory.loss_mask_T.astype(bool)
        ids = trajectory.response_ids_T
        assert text(lives, ids[chosen].tolist()) == "<tool>calculator(1+2)</tool>3"
        assert text(lives, ids[~chosen].tolist()) == "<result>3</result>"
        assert not trajectory.logprobs_T[~chosen].any()
        assert (trajectory.logprobs_T[chosen] == -0.5).all()
        assert ids[-1] == EOS_ID
        trajectory.check()
    if tokenizer is PIECES:
        (closing,) = PIECES.encode("</tool>")
        assert engine.requests[0].sampling.stop_token_ids == (EOS_ID, closing)


@pytest.mark.parametrize("turns", range(2, 40, 3))
@pytest.mark.parametrize("power", [True, False])
def test_a_journaled_call_is_not_made_again(turns: int, power: bool) -> None:
    """Whenever it is interrupted: the call is in the journal, or it is made once more."""
    tool, rules = with_tools()
    lives = Lives(rules)
    lives.live(lives.engine(chunk=2), cut_short_after=turns)
    if power:
        lives.lose_power()
    else:
        lives.end_in_order()
    begun = lives.store.open_groups()[0].begun if lives.store.open_groups() else {}
    journaled = {session for session, some in begun.items() if some.calls}
    made = len(tool.calls)
    lives.live(lives.engine(chunk=2))
    assert {key.session for key in tool.calls[made:]}.isdisjoint(journaled)
    assert lives.state is GroupState.FINISHED
    for trajectory in lives.trajectories():
        shown = text(lives, trajectory.response_ids_T.tolist())
        assert shown == "<tool>calculator(1+2)</tool><result>3</result>3"


def test_without_partials_the_journal_is_used_from_the_prompt() -> None:
    tool, rules = with_tools(continues=False)
    lives = Lives(rules)
    lives.live(lives.engine(holds=47), cut_short_after=60)
    lives.lose_power()
    assert len(tool.calls) == 2
    engine = lives.engine()
    lives.live(engine)
    assert [r.prefix_ids for r in engine.requests[:2]] == [(), ()]
    assert len(tool.calls) == 2
    assert lives.state is GroupState.FINISHED


def test_another_call_than_the_journal_has_starts_the_session_again() -> None:
    tool, rules = with_tools(continues=False)
    lives = Lives(rules)
    for session in (FIRST, SECOND):
        lives.store.tool_result(ToolResult(session, 0, 0, 0, "calculator", "7", "3+4"))
    lives.store.flush(1)
    lives.live(lives.engine())
    assert [(key.session, key.attempt) for key in tool.calls] == [(FIRST, 1), (SECOND, 1)]
    assert lives.state is GroupState.FINISHED


@pytest.mark.parametrize(
    "error", [InfrastructureError("no connection"), ConnectionResetError("reset"), TimeoutError()]
)
def test_a_tool_whose_ground_fails_is_called_again(error: BaseException) -> None:
    tool, rules = with_tools(error)
    lives = Lives(rules)
    engine = lives.engine()
    lives.live(engine)
    assert lives.state is GroupState.FINISHED
    assert len(tool.calls) == 3
    assert tool.calls[0] == tool.calls[2]
    # The tokens that asked for it are not generated again.
    assert len(engine.requests) == 4


def test_a_tool_that_hangs_is_given_up_in_the_end() -> None:
    class Hangs(CountingTool):
        async def call(self, key: object, arguments: object) -> str:
            await asyncio.Event().wait()
            raise AssertionError

    rules = replace(
        PLAIN, loop=ToolAgent(), tools=ToolRules({"calculator": Hangs()}, timeout_s=0.01)
    )
    lives = Lives(rules)
    lives.live(lives.engine())
    assert lives.state is GroupState.FAILED
    assert "tool calculator gave no result within 0.01 s (attempt 3)" in lives.reason


def test_wrong_use_is_told_to_the_model() -> None:
    _, rules = with_tools(*[ToolError("too deep")] * 2)
    lives = Lives(rules)
    lives.live(lives.engine())
    shown = [text(lives, t.response_ids_T.tolist()) for t in lives.trajectories()]
    assert shown == ["<tool>calculator(1+2)</tool><result>Error: too deep</result>3"] * 2


def test_a_bug_in_a_tool_fails_the_session_or_is_shown() -> None:
    _, rules = with_tools(*[KeyError("x")] * 2)
    lives = Lives(rules)
    lives.live(lives.engine())
    assert lives.state is GroupState.FAILED
    assert "tool calculator raised KeyError: 'x'" in lives.reason
    tool, rules = with_tools(*[KeyError("x")] * 2)
    lives = Lives(replace(rules, tools=ToolRules({"calculator": tool}, show_exceptions=True)))
    lives.live(lives.engine())
    shown = text(lives, lives.trajectories()[0].response_ids_T.tolist())
    assert "<result>Error: tool calculator raised KeyError: 'x'" in shown


def test_a_replayable_tool_is_told_of_the_calls_it_made_before() -> None:
    tool, rules = with_tools(kind=ToolKind.REPLAYABLE)
    lives = Lives(rules)
    lives.live(lives.engine(holds=47), cut_short_after=60)
    lives.lose_power()
    made = list(tool.calls)
    lives.live(lives.engine())
    assert tool.calls == made
    assert sorted(tool.replayed, key=str) == sorted([(key, "3") for key in made], key=str)
    assert sorted(tool.forgotten) == [FIRST, FIRST, SECOND, SECOND]


def test_a_session_whose_tool_lost_its_state_starts_again() -> None:
    tool, rules = with_tools(kind=ToolKind.RESTART)
    lives = Lives(rules)
    lives.live(lives.engine(holds=47), cut_short_after=60)
    lives.lose_power()
    lives.live(lives.engine())
    assert [key.attempt for key in tool.calls] == [0, 0, 1, 1]
    assert lives.state is GroupState.FINISHED


@pytest.mark.parametrize(("deterministic", "attempts"), [(True, [0, 0]), (False, [0, 1])])
def test_a_key_stands_for_one_call_though_a_session_starts_again(
    deterministic: bool, attempts: list[int]
) -> None:
    """Of a session that says the same again the key stays the same as well."""
    tool, rules = with_tools(
        *[ConnectionResetError("gone")] * 2,
        kind=ToolKind.REPLAYABLE,
        continues=False,
        deterministic=deterministic,
        retry_pause_s=0.0,
    )
    lives = Lives(rules)
    said = iter("12345678")

    def policy(request: GenerationRequest, before: str) -> str:
        if "</result>" in before:
            return "3\x01"
        return f"<tool>calculator({'1' if deterministic else next(said)})</tool>"

    lives.live(lives.engine(policy=policy))
    assert lives.state is GroupState.FINISHED
    assert [key.attempt for key in tool.calls if key.session == FIRST] == attempts


@pytest.mark.parametrize("budget", [28, 29, 40, 46])
def test_the_budget_is_never_exceeded(budget: int) -> None:
    tool, rules = with_tools(sampling=replace(SAMPLING, max_new_tokens=budget))
    lives = Lives(rules)
    lives.live(lives.engine())
    for trajectory in lives.trajectories():
        assert len(trajectory.response_ids_T) == budget
        assert trajectory.stop_reason is StopReason.LENGTH
    assert len(tool.calls) == (0 if budget == 28 else 2)


def test_a_model_that_calls_for_ever_has_so_many_turns() -> None:
    tool, rules = with_tools(loop=ToolAgent(max_turns=2))
    lives = Lives(replace(rules, sampling=replace(SAMPLING, max_new_tokens=200)))

    def always(request: GenerationRequest, said: str) -> str:
        return "<tool>calculator(1)</tool>\x01"

    lives.live(lives.engine(policy=always))
    assert [key.turn for key in tool.calls if key.session == FIRST] == [0, 1]
    shown = text(lives, lives.trajectories()[0].response_ids_T.tolist())
    assert shown.count("</tool>") == 3
    assert shown.count("</result>") == 2


def test_calls_beyond_the_limit_are_told_so() -> None:
    tool, rules = with_tools(loop=ToolAgent(max_calls=1))
    lives = Lives(replace(rules, sampling=replace(SAMPLING, max_new_tokens=300)))
    call = '{"name": "calculator", "arguments": {"expression": "1"}}'

    def many(request: GenerationRequest, said: str) -> str:
        return "3\x01" if "</result>" in said else f"<tool>[{call}, {call}, {call}]</tool>"

    lives.live(lives.engine(policy=many))
    shown = text(lives, lives.trajectories()[0].response_ids_T.tolist())
    assert "<result>3</result><result>Error: at most 1 calls in a turn</result>" in shown
    assert len(tool.calls) == 2


class _Judge:
    slow_verifier = False
    tokenizer = ByteTokenizer()

    def __init__(self, *raises: Exception) -> None:
        self.raises = list(raises)

    async def verify(self, prompt: Prompt, response_ids: Sequence[int]) -> RewardResult:
        if self.raises:
            raise self.raises.pop(0)
        await asyncio.Event().wait()
        raise AssertionError


def test_a_verifier_that_is_too_slow_fails_the_session() -> None:
    lives = Lives(replace(PLAIN, verifier_timeout_s=0.01))
    lives.task = _Judge()  # type: ignore[assignment]
    lives.live(lives.engine(policy=talks))
    assert lives.state is GroupState.FAILED
    assert "verifier gave no verdict within 0.01 s" in lives.reason
    told = [str(fields["message"]) for name, fields in lives.events if name == "warning"]
    assert told[0] == "session g0.s0 has failed: verifier gave no verdict within 0.01 s"


def test_a_deadline_inside_the_verifier_is_not_that_of_the_verifier() -> None:
    lives = Lives(PLAIN)
    lives.task = _Judge(*[TimeoutError("no answer from the grader")] * 2)  # type: ignore[assignment]
    lives.live(lives.engine(policy=talks))
    assert lives.state is GroupState.FAILED
    assert "verifier raised TimeoutError: no answer from the grader" in lives.reason


def test_a_verifier_whose_ground_fails_is_asked_again_about_the_same_answer() -> None:
    lives = Lives(replace(PLAIN, verifier_timeout_s=0.01))
    lives.task = _Judge(*[EngineLostError("reward model is gone")] * 2)  # type: ignore[assignment]
    engine = lives.engine(policy=talks)
    lives.live(engine)
    assert len(engine.requests) == 2
    assert "verifier gave no verdict" in lives.reason


def test_a_slow_verifier_is_asked_in_a_thread() -> None:
    import threading

    seen: list[str] = []

    class InAThread(_Judge):
        slow_verifier = True

        def verify(self, prompt: Prompt, response_ids: Sequence[int]) -> RewardResult:  # type: ignore[override]
            seen.append(threading.current_thread().name)
            return RewardResult(1.0, {"correct": 1.0})

    lives = Lives(PLAIN)
    lives.task = InAThread()  # type: ignore[assignment]
    lives.live(lives.engine(policy=talks))
    assert lives.state is GroupState.FINISHED
    assert len(seen) == 2
    assert all(name.startswith("verifier") for name in seen)
