// The first view: waits, curves of all runs, and what each run's broker, weights, waste and figures say.

import { Chart } from "./chart.js";
import { bytes, duration, h, number, table } from "./dom.js";
import { Lanes } from "./lanes.js";

const { panels, ages: AGES } = await (await fetch("api/panels")).json(); // of common/metrics.py
const evaluations = (run) => {
  const found = {};
  for (const line of run.state.evaluations ?? []) {
    const { policy_version: x, mean_reward: y, dataset } = line;
    if (typeof x !== "number" || typeof y !== "number") continue;
    (found[`evaluation ${dataset ?? ""}`] ??= []).push({ x, y, low: line.mean_reward_low ?? y, high: line.mean_reward_high ?? y });
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
    this.waits = h("section", { class: "card waits wide", "aria-live": "polite" });
    this.facts = h("div", { class: "facts" });
    this.lanes = new Lanes(true);
    this.root = h("div", { class: "overview" }, this.waits, this.charts[0].root, this.lanes.root, this.facts, this.charts.slice(1).map((chart) => chart.root));
  }

  draw(runs, { curves, state }) {
    if (curves || state) this.charts.forEach((chart) => chart.draw(runs));
    if (!state) return;
    this.lanes.root.hidden = runs.length > 1;
    if (runs.length === 1 && performance.now() - (this.lanesAt ?? -LANES_MS) > LANES_MS) {
      this.lanesAt = performance.now();
      this.lanes.show(runs[0], "");
    }
    const over = runs.every((run) => run.state.finished);
    this.waits.replaceChildren(h("h2", {}, over ? "Result" : "Who waits for whom"), ...runs.map((run) => waits(run, runs.length > 1)));
    this.facts.replaceChildren(...runs.map((run) => facts(run, runs.length > 1)));
    this.facts.classList.toggle("several", runs.length > 1);
  }
}

const title = (run) => h("h2", { class: `name ${run.colour}` }, run.title);

function waits(run, several) {
  const { stalls = [], note, learner, live, finished } = run.state;
  if (finished) return h("div", {}, several ? title(run) : "", h("p", { class: "finished" }, h("strong", {}, `Finished: ${number(finished.steps)} of ${number(finished.of)} steps`), finished.words));
  const lines = stalls.map((stall) => h("li", { class: stall.urgent ? "urgent" : "" }, h("span", { class: "text" }, stall.text), " ",
    h("a", { href: `#${stall.tab}/${run.index}/${encodeURIComponent(stall.find)}` }, stall.find ? `show ${stall.find}` : `show ${stall.tab}`)));
  for (const alarm of learner?.alarms ?? []) lines.unshift(h("li", { class: "urgent" }, alarm)); // watch rules
  if (note) lines.unshift(h("li", { class: "quiet" }, note));
  if (!lines.length) lines.push(h("li", { class: "quiet" }, live ? `The learner is ${learner?.state}. No wait is long enough to name.` : "Nothing is known yet."));
  return h("div", {}, several ? title(run) : "", h("ul", {}, lines));
}

function facts(run, several) {
  const { state } = run;
  const cards = [figures(state), staleness(state), weights(state), broker(state), waste(state)];
  return h("div", { class: "run" }, several ? title(run) : "", h("div", { class: "cards" }, cards));
}

const card = (name, ...content) => h("section", { class: "card" }, h("h2", {}, name), ...content);
const list = (rows) => h("dl", {}, rows.filter(([, value]) => value !== undefined && value !== null && value !== "").flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));

function figures(state) {
  const done = state.steps ? `${number(state.steps)}${state.wanted ? ` of ${number(state.wanted)}` : ""}` : "none yet";
  return card("Now", list([["steps", done], ...Object.entries(state.figures ?? {}).map(([name, text]) => [name, text.replaceAll("  ", " · ")])]));
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
