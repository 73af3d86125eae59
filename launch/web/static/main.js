// The page: what the server's events say about each run, the views, and the keys. The address after # names the view.

import { shared } from "./chart.js";
import { h } from "./dom.js";
import { Lanes } from "./lanes.js";
import { head, Overview } from "./overview.js";
import { makeNodes, makeTasks, makeTranscripts } from "./tables.js";
import { ConfigView, LogView } from "./text.js";
import { TranscriptView } from "./transcript.js";

const TABS = ["overview", "timeline", "nodes", "tasks", "transcripts", "config", "logs"];
const RELOAD_MS = 2000;
const element = (id) => document.getElementById(id);
const runs = [];
const views = { overview: new Overview(), timeline: new Lanes(), nodes: makeNodes(), tasks: makeTasks(), transcripts: makeTranscripts(), config: new ConfigView(), logs: new LogView() };
views.transcript = new TranscriptView(views.transcripts);
let shown = null, reloaded = 0, away = false;

/** {tab, run, words} of an address like #tasks/0/node-1. */
function place() {
  const [tab, run, ...words] = location.hash.slice(1).split("/").map((word) => { try { return decodeURIComponent(word); } catch { return word; } });
  return { tab: tab in views ? tab : "overview", run: runs[Number(run)] ?? runs[0], words };
}

function show() {
  const { tab, run, words } = place();
  if (!run) return;
  if (shown !== tab) element("view").replaceChildren(views[tab].root);
  shown = tab;
  reloaded = performance.now();
  element("tabs").replaceChildren(...TABS.map((name) => h("a", { href: `#${name}/${run.index}`, "aria-current": name === tab || (tab === "transcript" && name === "transcripts") ? "page" : null }, name)));
  element("runs").replaceChildren(...(runs.length > 1 ? runs.map((other) => h("a", { href: `#${tab === "transcript" ? "tasks" : tab}/${other.index}`, class: `name ${other.colour}`, "aria-current": other === run && tab !== "overview" ? "true" : null, title: other.state.path }, other.title)) : []));
  document.title = runs.length === 1 ? `${run.title} – Slipstream` : "Slipstream";
  drawHeads();
  if (tab === "overview") views.overview.draw(runs, { state: true });
  else if (tab === "transcript") views.transcript.show(run, words[0] ?? "", words[1], words[2]);
  else views[tab].show(run, words.join("/"));
}

function drawHeads() {
  element("heads").replaceChildren(...runs.map((run) => head(run, runs.length > 1)));
}

/** Put the buckets of an event behind those that are there; a new generation replaces them. */
function merge(run, curves) {
  const old = run.curves;
  if (!old || old.generation !== curves.generation || curves.first === 0) {
    run.curves = curves;
    return;
  }
  old.last = curves.last;
  for (const kind of ["mean", "least", "most"]) {
    for (const [name, values] of Object.entries(curves[kind] ?? {})) {
      old[kind][name].length = curves.first;
      old[kind][name].push(...values);
    }
  }
}

function heard({ run: index, state, curves }) {
  const known = runs.length;
  const run = (runs[index] ??= { index, colour: `run-${index % 8}`, state: {}, title: "", curves: null });
  if (state) run.state = state;
  if (curves) merge(run, curves);
  run.title = run.state.name ?? "";
  const same = runs.filter((other) => other && other.state.name === run.state.name);
  if (same.length > 1) for (const other of same) other.title = other.state.path;
  if (runs.includes(undefined)) return;
  if (state) drawHeads();
  if (shown === null || runs.length !== known) show();
  else if (shown === "overview") views.overview.draw(runs, { state: Boolean(state) });
  else if (shown !== "transcript" && place().run === run && performance.now() - reloaded > RELOAD_MS && !views[shown].offset) {
    reloaded = performance.now();
    views[shown].load();
  }
  document.body.dataset.steps = String(runs[0].state.steps ?? 0);
  say();
}

/** In the corner: whether a run works, or all are finished, unless the server itself is away. */
function say() {
  const live = runs.some((run) => run?.state.live), finished = runs.length && runs.every((run) => run?.state.finished);
  element("link").textContent = away ? "reconnecting" : live ? "live" : finished ? "finished" : "not running";
  element("link").className = (live || finished) && !away ? "live" : "";
}

function listen() {
  const stream = new EventSource("api/events");
  stream.onopen = () => { away = false; };
  stream.onerror = () => { away = true; say(); };
  stream.onmessage = (event) => heard(JSON.parse(event.data));
}

function theme(wanted) {
  const dark = wanted ? wanted === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  element("theme").textContent = dark ? "light" : "dark";
  for (const lanes of [views.timeline, views.overview.lanes]) if (lanes.found) lanes.draw();
  shared.changed();
}

function turnTheme() {
  wanted = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("theme", wanted); } catch { /* a browser may forbid it */ }
  theme(wanted);
}

function key(event) {
  const typing = event.target.matches("input, select");
  if (event.key === "Escape") {
    if (typing) {
      event.target.blur();
      if (event.target.value) location.hash = `#${shown}/${place().run?.index ?? 0}`;
    } else if (shown === "transcript") history.back();
    else location.hash = "#overview";
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const view = views[shown], { run, tab } = place();
  const turn = { "[": -1, "]": 1 }[event.key];
  if (/^[1-7]$/.test(event.key)) location.hash = `#${TABS[event.key - 1]}/${run?.index ?? 0}`;
  else if (turn && run) location.hash = `#${tab === "transcript" ? "tasks" : tab}/${(run.index + turn + runs.length) % runs.length}`;
  else if (event.key === "t") turnTheme();
  else if (event.key === "c" && shown === "transcript") view.colour();
  else if ((event.key === "n" || event.key === "p") && shown === "transcript") view.go(event.key === "n" ? 1 : -1);
  else if (event.key === "j" || event.key === "k") view.move?.(event.key === "j" ? 1 : -1);
  else if (event.key === "Enter" && !event.target.closest("a, button")) view.open?.();
  else if (event.key === "/" && view.input) {
    view.input.focus();
    event.preventDefault();
  }
}

let wanted = null;
try { wanted = localStorage.getItem("theme"); } catch { /* likewise */ }
theme(wanted);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => !wanted && theme());
element("theme").addEventListener("click", turnTheme);
addEventListener("hashchange", show);
addEventListener("keydown", key);
listen();
