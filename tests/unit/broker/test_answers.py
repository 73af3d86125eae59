"""Requests and the rules of the delivery state that answer them."""

import inspect
from typing import Any, get_args, get_type_hints

import pytest

from broker.delivery.state import DeliveryState
from broker.messaging import wire
from broker.server.handlers import rule

MORE = {wire.AskLease, wire.Take, wire.Complete, wire.Cancel}  # these wait, bring a payload, or have no rule


@pytest.mark.parametrize("kind", [kind for kind in get_args(wire.AnyRequest) if kind not in MORE])
def test_a_requests_tag_fields_and_answer_are_those_of_its_rule(kind: Any) -> None:
    name, arguments = rule(kind)
    method = getattr(DeliveryState, name)
    assert [parameter for parameter in inspect.signature(method).parameters if parameter != "self"] == [*arguments]
    [answer] = get_args(kind.__orig_bases__[0])
    assert get_type_hints(method)["return"] == answer
