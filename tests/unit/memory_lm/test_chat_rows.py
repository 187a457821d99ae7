"""Fields of chat rows as data sets have them: each is learned, or refused in one sentence."""

import json

import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm import chat

TURNS = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes"}]
WANT = [("user", "Hi?"), ("assistant", "Yes")]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TURNS},
        {"messages": tuple(TURNS)},
        {"messages": np.array(TURNS, object)},
        {"messages": json.dumps(TURNS)},
        {"messages": [json.dumps(turn) for turn in TURNS]},
        {"messages": {"role": ["user", "assistant"], "content": ["Hi?", "Yes"]}},
        {"messages": None, "conversations": [{"from": "user", "value": "Hi?"}, {"from": "assistant", "value": "Yes"}]},
        {"messages": None, "prompt": "Hi?", "response": "Yes"},
        {"messages": float("nan"), "conversations": np.nan, "prompt": "Hi?", "response": "Yes"},  # as pandas has it
        {"prompt": TURNS[:1], "response": TURNS[1:]},
        {"prompt": "Hi?", "response": TURNS[1]},
        {"prompt": [{"type": "text", "text": "Hi?"}], "response": {"type": "text", "text": "Yes"}},
        {"messages": [{"role": None, "from": "user", "content": ["Hi", "?"]}, TURNS[1] | {"tool_calls": None}]},
    ],
)
def test_every_form_of_a_conversation_is_read(row):
    assert chat.turns(chat.messages_of(row)) == WANT


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (float("nan"), ""),
        (np.float32("nan"), ""),
        (np.array(7), "7"),
        (np.array(["a", "b"]), "ab"),
        ("", ""),
        (0, "0"),
        (7, "7"),
        (2.5, "2.5"),
        (["a", {"type": "text", "text": "b"}], "ab"),
        ([{"type": "text", "text": None}], ""),
        ([{"type": "text", "text": 3}], "3"),
        ([], ""),
        ('[{"type": "text", "text": "as it is"}]', '[{"type": "text", "text": "as it is"}]'),
    ],
)
def test_content_of_any_kind_is_text(value, text):
    assert chat.turns([{"role": "user", "content": value}]) == [("user", text)]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": None}, "None in messages"),
        ({"messages": None, "conversations": None}, "None in messages and conversations"),
        ({"messages": float("nan")}, "None in messages"),
        ({"prompt": float("nan"), "response": None}, "neither a prompt nor a response"),
        ({"prompt": None, "response": None}, "neither a prompt nor a response"),
        ({"messages": 5}, "messages of a chat row is 5"),
        ({"messages": "Hi?"}, "messages of a chat row is 'Hi"),
        ({"messages": '{"role"'}, "messages of a chat row is"),
        ({"messages": {"role": ["user"], "content": ["a", "b"]}}, "different lengths"),
        ({"messages": [None]}, "turn 0 of a chat row is None"),
        ({"messages": [TURNS[0], 4]}, "turn 1 of a chat row is 4"),
        ({"messages": ["Hi?"]}, "turn 0 of a chat row is 'Hi"),
        ({"messages": [["user", "Hi?"]]}, "turn 0 of a chat row is"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "has the role"),
        ({"messages": [{"role": "user", "content": [None]}]}, "part of type NoneType"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "a"}]}]}, "part of type image"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ["a"]}]}]}, "has the text"),
        ({"messages": [{"role": "user", "content": b"a"}]}, "content of a chat turn is b'a', wanted a text"),
        ({"messages": [{"role": "user", "content": object()}]}, "content of a chat turn is <object"),
        ({"messages": [{"role": "user", "content": {"answer": 1}}]}, "part of type unknown"),
    ],
)
def test_what_is_no_conversation_is_refused_in_one_sentence(row, told):
    with pytest.raises(UserError, match=told) as refused:
        chat.turns(chat.messages_of(row))
    assert "\n" not in str(refused.value)


def test_a_row_without_turns_is_no_conversation():
    assert chat.messages_of({"text": "a"}) is None
    assert chat.messages_of({"messages": []}) == []
