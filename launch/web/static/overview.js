// The first view: tiles, who waits, curves of all runs, the newest states, and what broker, weights and waste say.

import { AXES, Chart, shared } from "./chart.js";
import { bytes, duration, h, number, table } from "./dom.js";
import { Lanes } from "./lanes.js";

const { panels, ages: AGES } = await (await fetch("api/panels")).json(); // of common/metrics.py
const evaluations = (run) => {
  const found = {};
  for (const line of run.state.evaluations ?? []) {
    const { policy_version: step, mean_reward: y, time_s, dataset } = line;
    if (typeof step !== "number" || typeof y !== "number") continue;
    (found[`evaluation ${dataset ?? ""}`] ??= []).push({ step, time_s, y, low: line.mean_reward_low ?? y, high: line.mean_reward_high ?? y });
  }
  return found;
};
const CHARTS = panels.map((panel, index) => ({
  ...panel,
  unit: panel.note || panel.unit,
  wide: index === 0,
  lines: Object.entries(panel.lines).map(([metric, label]) => ({ metric, label, add: panel.band })),
  bound: panel.bound && ((run) => run.state.max_staleness),
  points: panel.evaluations && evaluations,
}));

const LANES_MS = 4000; // between two looks at the trace

export class Overview {
  constructor() {
    this.charts = CHARTS.map((spec) => new Chart(spec));
    this.tiles = h("div", { class: "tiles wide" });
    this.waits = h("section", { class: "waits wide", "aria-label": "Who waits", "aria-live": "polite" });
    this.opened = new Set(); // runs all of whose waits are shown
    this.facts = h("div", { class: "facts" });
    this.system = h("details", { class: "system wide" }, h("summary", {}, "System: staleness, weights, broker, waste"), this.facts);
    this.lanes = new Lanes(true);
    this.root = h("div", { class: "overview" }, this.tiles, this.waits, this.controls(), this.charts.map((chart) => chart.root), this.lanes.root, this.system);
  }

  /** What all charts share: the x axis, the smoothing, and the way back from a zoom. */
  controls() {
    const redraw = (shared.changed = () => {
      this.reset.hidden = !shared.zoom;
      this.charts.forEach((chart) => chart.draw(this.runs));
    });
    this.reset = h("button", { type: "button", hidden: true, onclick: () => { shared.zoom = null; redraw(); } }, "whole run");
    const axes = Object.keys(AXES).map((axis) => h("button", { type: "button", role: "radio", "aria-checked": String(axis === shared.axis), "data-axis": axis, onclick: (event) => {
      [shared.axis, shared.zoom] = [axis, null];
      for (const other of event.target.parentNode.children) other.setAttribute("aria-checked", String(other === event.target));
      redraw();
    } }, axis));
    const weight = h("output", {}, "off");
    const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, "aria-label": "Smoothing", oninput: (event) => {
      shared.smoothing = Number(event.target.value);
      weight.textContent = shared.smoothing ? shared.smoothing.toFixed(2) : "off";
      redraw();
    } });
    return h("div", { class: "controls wide" }, h("div", { role: "radiogroup", "aria-label": "Horizontal axis", class: "choice" }, axes),
      h("label", {}, "smoothing", slider, weight), this.reset, h("span", { class: "quiet hint" }, "drag to zoom, double-click for the whole run"));
  }

  draw(runs, { state }) {
    this.runs = runs;
    const several = runs.length > 1;
    this.charts.forEach((chart) => chart.draw(runs));
    this.tiles.replaceChildren(...TILES.map((tile) => drawTile(tile, runs)));
    if (!state) return;
    this.lanes.root.hidden = several;
    if (!several && performance.now() - (this.lanesAt ?? -LANES_MS) > LANES_MS) {
      this.lanesAt = performance.now();
      this.lanes.show(runs[0], "");
    }
    this.waits.replaceChildren(...runs.map((run) => this.strip(run, several)));
    this.facts.replaceChildren(...runs.map((run) => facts(run, several)));
    this.facts.classList.toggle("several", several);
  }

  /** One line for what a run waits for, all of them when a person has to act; a finished run has its result there. */
  strip(run, several) {
    const { stalls = [], note, learner, live, phase, figures = {}, finished } = run.state;
    const name = several ? h("span", { class: `name ${run.colour}` }, run.title) : "";
    if (finished) return h("div", { class: "strip finished" }, name, h("p", {}, h("strong", {}, `Finished: ${number(finished.steps)} of ${number(finished.of)} steps`), finished.words));
    const urgent = (learner?.alarms ?? []).map((alarm) => h("li", { class: "urgent" }, alarm)); // watch rules
    if (phase === "failed") urgent.unshift(h("li", { class: "urgent" }, "The learner has failed. ", h("a", { href: `#logs/${run.index}/learner-0.log` }, "show its log")));
    const calm = [];
    for (const stall of stalls) (stall.urgent ? urgent : calm).push(h("li", { class: stall.urgent ? "urgent" : "" }, h("span", { class: "text" }, stall.text), " ",
      h("a", { href: `#${stall.tab}/${run.index}/${encodeURIComponent(stall.find)}` }, stall.find ? `show ${stall.find}` : `show ${stall.tab}`)));
    if (!urgent.length && !calm.length) calm.push(h("li", { class: "quiet" }, note || (live ? `Nobody waits for long; the learner is ${learner?.state}.` : "Nothing is known yet.")));
    else if (note) calm.push(h("li", { class: "quiet" }, note));
    if (figures.advice) calm.push(h("li", { class: "quiet" }, `Advice: ${figures.advice}`));
    const lines = [...urgent, ...calm], shown = urgent.length || 1, rest = lines.slice(shown);
    const turn = () => (this.opened.has(run.index) ? this.opened.delete(run.index) : this.opened.add(run.index));
    const more = rest.length ? h("details", { open: this.opened.has(run.index) }, h("summary", { onclick: turn }, `${rest.length} more`), h("ul", {}, rest)) : "";
    return h("div", { class: `strip ${urgent.length ? "urgent" : ""}` }, name, h("h2", {}, "Who waits"), h("ul", {}, lines.slice(0, shown)), more);
  }
}

const signed = (value) => `${value < 0 ? "−" : "+"}${number(Math.abs(value))}`;

/** Each: the title, and of a run its figure and the words below it. */
const TILES = [
  ["Reward", ({ now = {} }) => {
    const change = now.reward - now.reward_before;
    return [number(now.reward), typeof now.reward_before === "number" ? [h("b", { class: change < 0 ? "down" : "up" }, signed(change)), " in ten steps"] : "mean of the newest steps"];
  }],
  ["Held-out accuracy", ({ evaluations: lines = [], finished }) => {
    const [dataset, value] = Object.entries(finished?.held_out ?? {})[0] ?? [];
    if (value !== undefined) return [number(value), `${dataset}, final model`];
    const newest = lines.at(-1), first = lines.find((line) => line.dataset === newest?.dataset);
    if (!newest) return ["–", "no evaluation yet"];
    const change = newest.mean_reward - first.mean_reward;
    return [number(newest.mean_reward), [newest === first ? "" : h("b", { class: change < 0 ? "down" : "up" }, signed(change)), newest === first ? "" : " since the first; ", `version ${number(newest.policy_version)}, ${newest.dataset ?? ""}`]];
  }],
  ["Trained tokens/s", ({ now = {} }) => [number(now.trained_per_s && Math.round(now.trained_per_s)),
    typeof now.generated_per_s === "number" ? `${number(Math.round(now.generated_per_s))} generated per second` : "over the newest ten steps"]],
  ["Step time", ({ now = {} }) => [duration(now.step_s), now.step_s ? `${Math.round((100 * now.idle_s) / now.step_s)} % of it waiting for groups` : "no step yet"]],
];

function drawTile([title, of], runs) {
  const several = runs.length > 1;
  return h("section", { class: "card tile" }, h("h2", {}, title), runs.map((run) => {
    const [value, words] = of(run.state);
    return h("div", { class: "of" }, several ? h("span", { class: `name ${run.colour}`, title: run.title }) : "", h("strong", {}, value), h("span", { class: "quiet" }, words));
  }));
}

/** A run's name, model, state, progress, and times, above every view. */
export function head(run, several) {
  const { steps = 0, wanted, model = "", path, phase = "connecting", elapsed_s, left_s, finished } = run.state;
  const done = finished?.steps ?? steps, times = [];
  if (typeof elapsed_s === "number") times.push(`${duration(elapsed_s)} elapsed`);
  if (typeof left_s === "number") times.push(`${duration(left_s)} left`);
  return h("div", { class: "head" }, h("strong", { class: several ? `name ${run.colour}` : "", title: path }, run.title),
    model ? h("span", { class: "quiet model", title: model }, model.replace(/\/+$/, "").split("/").slice(-2).join("/")) : "",
    h("span", { class: `badge ${/^[\w ]+$/.test(phase) ? phase.replaceAll(" ", "-") : ""}` }, phase),
    wanted ? h("progress", { max: wanted, value: Math.min(done, wanted), "aria-label": "Steps done" }) : "",
    h("span", { class: "done" }, `${number(done)}${wanted ? ` of ${number(wanted)}` : ""} steps`), h("span", { class: "quiet" }, times.join(", ")),
    (run.state.files ?? []).map((name) => h("a", { href: `api/runs/${run.index}/files/${name}`, download: true }, name)));
}

const title = (run) => h("h2", { class: `name ${run.colour}` }, run.title);

function facts(run, several) {
  const { state } = run;
  const cards = [figures(state), staleness(state), weights(state), broker(state), waste(state)];
  return h("div", { class: "run" }, several ? title(run) : "", h("div", { class: "cards" }, cards));
}

const card = (name, ...content) => h("section", { class: "card" }, h("h2", {}, name), ...content);
const list = (rows) => h("dl", {}, rows.filter(([, value]) => value !== undefined && value !== null && value !== "").flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));

function figures(state) {
  return card("Now", list([["steps", state.steps ? number(state.steps) : "none yet"], ...Object.entries(state.figures ?? {}).map(([name, text]) => [name, text.replaceAll("  ", " · ")])]));
}

function staleness({ ages: counts = [], max_staleness: bound }) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  const most = Math.max(...counts, 1);
  const beyond = (i) => typeof bound === "number" && AGES[i].least > bound;
  const rows = total ? AGES.map((age, i) => {
    const last = typeof bound === "number" && !beyond(i) && (i + 1 === AGES.length || beyond(i + 1));
    return h("tr", { class: beyond(i) ? "beyond" : "" }, h("th", { scope: "row" }, age.name.replace("-", "–") + (last ? " (bound)" : "")),
      h("td", { class: "bar" }, h("span", { "width%": (100 * (counts[i] ?? 0)) / most })),
      h("td", { class: "right" }, `${(100 * (counts[i] ?? 0) / total).toFixed(1)} %`));
  }) : [h("tr", {}, h("td", {}, "no trained tokens yet"))];
  const caption = `Trained tokens of the newest steps, bound ${bound ?? "unknown"}`;
  const late = counts.some((count, i) => count && beyond(i));
  return card("Staleness", table(caption, [["versions"], [""], ["share", "right"]], rows), late ? h("p", { class: "urgent" }, "Some tokens are beyond the bound.") : "");
}

function weights({ learner, versions = [], states = {} }) {
  const late = learner?.deliveries ?? [];
  const nodes = versions.map(([version, count]) => h("tr", {}, h("th", { scope: "row" }, version < 0 ? "none yet" : `version ${number(version)}`), h("td", { class: "right" }, `${number(count)} node${count === 1 ? "" : "s"}`)));
  const stages = Object.entries(states).map(([name, count]) => `${number(count)} ${name}`).join(", ");
  const on = late.slice(0, 6).map((d) => h("li", {}, `version ${d.version} to ${d.node_id}: ${d.stage}, ${duration(d.since_s)}`));
  const more = (learner?.deliveries_waiting ?? 0) - on.length;
  return card("Weights", list([["learner", learner ? `${learner.state}, version ${number(learner.policy_version)}` : undefined], ["nodes", stages]]),
    nodes.length ? table("Nodes by version", [["version"], ["nodes", "right"]], nodes) : "",
    on.length ? h("h3", {}, "On their way") : "", on.length ? h("ul", { class: "plain" }, on, more > 0 ? h("li", {}, `and ${number(more)} more`) : "") : "");
}

function broker({ broker: b, live, note, finished }) {
  if (!b) return card("Broker", h("p", { class: "quiet" }, note || "no broker yet"));
  return card("Broker", list([
    ["state", live ? (b.stopping ? "stopping" : "serving") : finished ? "ended" : "does not answer"],
    ["ready", number(b.groups_ready)], ["leased", number(b.groups_leased)], ["pending", number(b.groups_pending)],
    ["oldest lease", duration(b.oldest_lease_s)], ["groups kept", `${bytes(b.bytes_held)} of ${bytes(b.max_bytes)}`],
    ["store", b.store ? `${bytes(b.store.bytes)}, a sync takes ${duration(b.store.sync_s)}${b.store.stuck ? `; stuck: ${b.store.stuck}` : ""}` : "none"],
    ["leases lost", number(b.lease_expiries)], ["dead tasks", number(b.groups_dead)],
  ]));
}

function waste({ waste: reasons = {}, wasted, samples_failed: failed = {} }) {
  const found = Object.entries(reasons).filter(([, w]) => w.tokens || w.seconds);
  const size = found.some(([, w]) => w.tokens) ? (w) => w.tokens : (w) => w.seconds;
  const most = Math.max(...found.map(([, w]) => size(w)));
  const rows = found.map(([reason, w]) => h("tr", {}, h("th", { scope: "row" }, reason), h("td", { class: "bar" }, h("span", { "width%": (100 * size(w)) / most })),
    h("td", { class: "right" }, w.tokens ? number(w.tokens) : "–"), h("td", { class: "right" }, w.seconds ? duration(w.seconds) : "–")));
  const samples = Object.entries(failed).map(([reason, count]) => `${number(count)} ${reason}`).join(", ");
  return card("Waste", rows.length ? table(wasted || "Time without use", [["reason"], [""], ["tokens", "right"], ["time", "right"]], rows) : h("p", { class: "quiet" }, "nothing wasted"),
    samples ? h("p", {}, `failed samples: ${samples}`) : "");
}
