"""Agents of well-known libraries, each with one tool; docs/clients.md says what each library needs.

tasks:
  environment: "examples.agent_clients:openai_agents"    # or another function of this file
  dataset: questions.jsonl                               # {"question": "...", "answer": "..."}
  limits: {python: .venv-adapters/bin/python}
"""

import asyncio
import os
from typing import Any

from rollout_fleet.environments.protocol import Limits

TURNS = 8


def add(a: int, b: int) -> int:
    """Adds two numbers as they are added on the moon.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b + 1000


def judged(problem: dict[str, Any], answer: object) -> float:
    return float(str(answer).strip() == problem["answer"])


async def openai_agents(
    problem: dict[str, Any], *, base_url: str, api_key: str, model: str, seed: int, api: str = "responses"
) -> float:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)  # it would send every run to OpenAI
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        kind = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
        agent = Agent("adder", tools=[function_tool(add)], model=kind(model, client))
        result = await Runner.run(agent, problem["question"], max_turns=TURNS)
    return judged(problem, result.final_output)


async def pydantic_ai(problem: dict[str, Any], *, base_url: str, api_key: str, model: str, seed: int) -> float:
    from openai import AsyncOpenAI
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        agent = Agent(OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client)), tools=[add])
        result = await agent.run(problem["question"])
    return judged(problem, result.output)


async def smolagents(problem: dict[str, Any], *, base_url: str, api_key: str, model: str, seed: int) -> float:
    """It ends when the policy calls the tool `final_answer`."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool
    from smolagents.models import REMOVE_PARAMETER

    options = {"tool_choice": "auto", "stop": REMOVE_PARAMETER}  # it would require calls, and stop at its own words
    served = OpenAIServerModel(model, base_url, api_key, client_kwargs={"max_retries": 0}, **options)
    agent = ToolCallingAgent([tool(add)], served, max_steps=TURNS, verbosity_level=0)
    return judged(problem, await asyncio.to_thread(agent.run, problem["question"]))


async def langgraph(problem: dict[str, Any], *, base_url: str, api_key: str, model: str, seed: int) -> float:
    os.environ["LANGSMITH_TRACING"] = "false"  # before the import: it would send every run to LangSmith
    from langchain_openai import ChatOpenAI
    from langgraph.graph import MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    chat = ChatOpenAI(model=model, base_url=base_url, api_key=api_key, max_retries=0).bind_tools([add])

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("ask", ask).add_node("tools", ToolNode([add]))
    graph.set_entry_point("ask").add_conditional_edges("ask", tools_condition).add_edge("tools", "ask")
    found = await graph.compile().ainvoke({"messages": [("user", problem["question"])]}, {"recursion_limit": 2 * TURNS})
    return judged(problem, found["messages"][-1].content)


async def anthropic(problem: dict[str, Any], *, base_url: str, api_key: str, model: str, seed: int) -> float:
    from anthropic import AsyncAnthropic

    number = {"type": "integer"}
    schema = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
    tools = [{"name": "add", "description": str(add.__doc__), "input_schema": schema}]
    messages: list[Any] = [{"role": "user", "content": problem["question"]}]
    async with AsyncAnthropic(base_url=base_url, api_key=api_key, max_retries=0) as client:
        while True:
            said = await client.messages.create(model=model, max_tokens=1024, messages=messages, tools=tools)
            calls = [block for block in said.content if block.type == "tool_use"]
            if not calls:
                return judged(problem, "".join(block.text for block in said.content if block.type == "text"))
            answers = [{"type": "tool_result", "tool_use_id": c.id, "content": str(add(**c.input))} for c in calls]
            messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": answers}]


for function, library in (
    (openai_agents, "agents"),
    (pydantic_ai, "pydantic_ai.models.openai"),
    (smolagents, "smolagents"),
    (langgraph, "langchain_openai"),
    (anthropic, "anthropic"),
):
    function.LIMITS = Limits(process=True, memory_mib=8192, cpu_s=600)  # type: ignore[attr-defined]
    function.PRELOAD = (library,)  # type: ignore[attr-defined]
