"""Templates, histories and session files: what becomes a prompt, and what is refused."""

import json
from itertools import pairwise

import pytest
from command import assert_one_line

from residency.conf import compose
from residency.policies.errors import WorkloadError
from residency.runtime.chat_template import ChatTemplate
from residency.runtime.conversation import common_prefix
from residency.runtime.history import History
from residency.runtime.sessions.session import read_sessions

# Drops what stands between <think> and </think> in all answers but the newest.
THINKING = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1] | trim }}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@pytest.fixture
def tokenizer():
    return compose().model.weights().tokenizer()


def prompts_of(history, exchanges, limit=1 << 20):
    """Each turn's prompt and the tokens of its answer."""
    for user, assistant in exchanges:
        prompt = history.ask(user)
        ids, text = history.template.answer(history.messages, assistant, limit)
        history.answer(text)
        yield prompt, ids


TALK = [("Hello there.", "Well met!"), ("What is a list?", "A row of things."), ("Thanks", "Bye")]


@pytest.mark.parametrize("own", [True, False], ids=["its template", "lines behind roles"])
@pytest.mark.parametrize("limit", [3, 100])
def test_a_prompt_begins_with_the_one_before_and_its_answer(tokenizer, own, limit):
    if not own:
        tokenizer.chat_template = None
    template = ChatTemplate(tokenizer)
    assert bool(template.notes) is not own
    turns = list(prompts_of(History(template, 1000, 10, "refuse", system="Be kind."), TALK, limit))
    for (prompt, ids), (later, _) in pairwise(turns):
        assert 0 < len(ids) <= limit
        assert later[: len(prompt) + len(ids)] == prompt + ids


def test_a_template_that_drops_reasoning_keeps_the_prompt_before_it(tokenizer):
    tokenizer.chat_template = THINKING
    history = History(ChatTemplate(tokenizer), 1000, 10, "refuse")
    thought = [(user, f"<think>hmm, {user}</think>{said}") for user, said in TALK]
    (first, answer), (second, _), _ = prompts_of(history, thought)
    assert common_prefix(first + answer, second) == len(first)
    assert "hmm" in tokenizer.decode(answer) and "hmm" not in tokenizer.decode(second)


def test_a_tokenizer_that_stands_in_keeps_lengths_and_prefixes(tokenizer):
    config = compose(["model=qwen3_30b_a3b"]).model.architecture.config
    stand_in, own = ChatTemplate.of(None, config), ChatTemplate(tokenizer)
    assert_one_line("\n".join(stand_in.notes), "has no tokenizer", "lengths")
    messages = [{"role": "user", "content": TALK[0][0]}]
    assert stand_in.ids(messages) == own.ids(messages)  # this vocabulary is larger than its own
    small = ChatTemplate(tokenizer, 100)
    assert small.ids(messages) == [i % 100 for i in own.ids(messages)]


def test_what_a_template_refuses_is_refused_with_its_turn(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system') }}"
    history = History(ChatTemplate(tokenizer), 1000, 10, "refuse", name="session x")
    with pytest.raises(WorkloadError, match=r"session x, turn 1: the chat template .* no system"):
        history.ask("hello")
    assert history.turns == []


def test_the_oldest_turns_are_dropped_and_no_more_than_must(tokenizer):
    template = ChatTemplate(tokenizer)
    whole = History(template, 10_000, 8, "refuse", system="Be kind.")
    *_, (longest, _) = prompts_of(whole, TALK)
    fitting = History(template, len(longest) + 8, 8, "drop_oldest", system="Be kind.")
    assert [p for p, _ in prompts_of(fitting, TALK)][-1] == longest and fitting.dropped == 0
    short = History(template, len(longest) + 7, 8, "drop_oldest", system="Be kind.")
    *_, (dropped, _) = prompts_of(short, TALK)
    assert short.dropped == 1 and short.num_turns == 3
    assert dropped == template.ids([*short.system, *whole.turns[2:-1]])
    assert short.take_back() == TALK[-1][0] and short.take_back() == TALK[-2][0]
    assert short.ask(TALK[1][0]) == template.ids([*short.system, *short.turns])


@pytest.mark.parametrize("overflow", ["refuse", "drop_oldest"])
def test_a_session_that_is_too_long_is_refused_with_turn_and_tokens(tokenizer, overflow):
    history = History(ChatTemplate(tokenizer), 30, 8, overflow, name="session x")
    list(prompts_of(history, TALK[:1]))
    before = list(history.turns)
    with pytest.raises(WorkloadError) as refused:
        history.ask("word " * 60)
    assert_one_line(str(refused.value), "session x, turn 2", "tokens", "context of 30")
    assert_one_line(
        str(refused.value), "model.context", f"workload.overflow{'=' * (overflow[0] == 'r')}"
    )
    assert history.turns == before and history.dropped == 0


def test_the_sample_is_whole():
    sessions = read_sessions("")
    assert len(sessions) == 12 == len({one.name for one in sessions})
    assert sum(len(one.exchanges) for one in sessions) == 68
    assert all(exchange.assistant for one in sessions for exchange in one.exchanges)


def test_lines_are_read(tmp_path):
    file = tmp_path / "talk.jsonl"
    system, user, said = (
        {"role": role, "content": f"{role} é"} for role in ("system", "user", "assistant")
    )
    lines = [
        {"messages": [user]},
        {"id": "b", "x": 1, "messages": [system, user, said, user, said]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    one, two = read_sessions(str(file))
    assert (one.name, one.system, len(one.exchanges)) == ("line 1", "", 1)
    assert one.exchanges[0].assistant is None
    assert (two.name, two.system, len(two.exchanges)) == ("b", "system é", 2)


USER = '{"role": "user", "content": "a"}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("there is no session",)),
        ("\n \n", ("there is no session",)),
        (f'{{"messages": [{USER}]}}\n{{"messages"', ("line 2", "not JSON")),
        ("[1]", ("line 1", 'list of "messages"')),
        ('{"messages": []}', ("line 1", "no message of a user")),
        ('{"messages": [{"role": "system", "content": "a"}]}', ("line 1", "no message of a user")),
        (f'{{"messages": [{USER}, {USER}]}}', ("line 1, message 2", "role is user", "assistant")),
        ('{"messages": [{"role": "usr", "content": "a"}]}', ("message 1", '"role" must be')),
        ('{"messages": [{"role": "user", "content": 3}]}', ("message 1", '"content" must be text')),
        ('{"messages": [{"role": "user", "content": " "}]}', ("message 1", '"content" is empty')),
        ('{"messages": [{"role": "user"}]}', ("message 1", '"content" must be text')),
    ],
)
def test_lines_that_are_no_sessions_are_refused_by_number(tmp_path, text, words):
    file = tmp_path / "talk.jsonl"
    file.write_text(text)
    with pytest.raises(WorkloadError) as refused:
        read_sessions(str(file))
    assert_one_line(str(refused.value), f"workload.path={file}", *words)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_sessions(str(tmp_path / "none.jsonl"))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_sessions(str(tmp_path / "bytes"))
