// One episode: its turns, with every token coloured by policy version, ratio or loss mask.

import { h, number } from "./dom.js";
import { load, preview, transcriptLink } from "./tables.js";

const MODES = ["version", "ratio", "mask"];
const RATIOS = [[0.5, "r0", "under 0.5"], [0.8, "r1", "0.5 to 0.8"], [1.25, "r2", "0.8 to 1.25"], [2, "r3", "1.25 to 2"], [Infinity, "r4", "over 2"]];

export class TranscriptView {
  /** list: the table of transcripts; those before and after one are its neighbours there. */
  constructor(list) {
    this.list = list;
    this.mode = "version";
    this.body = h("div");
    this.samples = h("nav", { class: "samples", "aria-label": "Transcripts of this task" });
    this.head = h("h2");
    this.choice = h("div", { role: "radiogroup", "aria-label": "Colour of tokens", class: "choice" }, MODES.map((mode) =>
      h("button", { type: "button", role: "radio", "data-mode": mode, onclick: () => this.colour(mode) }, mode)));
    this.back = h("button", { type: "button", title: "Previous in the list (p)", onclick: () => this.go(-1) }, "previous");
    this.next = h("button", { type: "button", title: "Next in the list (n)", onclick: () => this.go(1) }, "next");
    this.root = h("section", { class: "card transcript" }, h("div", { class: "bar-top" }, this.head, this.back, this.next, this.choice), this.samples, this.body);
  }

  /** Open the neighbour in the list of transcripts, as it was last filtered. */
  go(by) {
    const link = this.neighbour(by);
    if (link) location.hash = link;
  }

  neighbour(by) {
    const { rows } = this.list;
    const at = rows.findIndex((row) => transcriptLink(row, this.run) === this.link);
    const other = at < 0 ? null : rows[at + by];
    return other ? transcriptLink(other, this.run) : null;
  }

  async show(run, task, sample, step) {
    const asked = (this.asked = `${run.index}/${task}/${sample}/${step}`);
    this.head.textContent = `Task ${task}`;
    [this.run, this.link] = [run, location.hash];
    if (this.list.run !== run || !this.list.rows.length) await this.list.show(run, "");
    const listed = await load(`api/runs/${run.index}/transcripts?task=${encodeURIComponent(task)}&limit=64`);
    if (asked !== this.asked) return;
    const rows = listed.rows ?? [];
    this.choice.hidden = !rows.length;
    const first = sample === undefined || sample === "" ? rows[0] : rows.find((t) => String(t.sample) === sample && (step === "" || step === undefined || String(t.step) === step));
    if (first) this.link = transcriptLink(first, run);
    this.back.disabled = !this.neighbour(-1);
    this.next.disabled = !this.neighbour(1);
    this.samples.replaceChildren(...rows.map((t) => h("a", { href: transcriptLink(t, run), "aria-current": t === first ? "true" : null },
      h("span", {}, `sample ${t.sample} `, h("b", {}, `reward ${number(t.reward)}`), ` ${t.why.join(", ")}`), preview(t))));
    if (!first) {
      this.found = null;
      this.body.replaceChildren(h("p", { class: "quiet" }, listed.refused ?? "No transcript of this task is kept; telemetry.transcripts says which are. ", listed.refused ? "" : h("a", { href: `#transcripts/${run.index}` }, "show those that are kept")));
      return;
    }
    const words = new URLSearchParams({ task: first.serial, sample: first.sample, ...(first.step === null ? {} : { step: first.step }) });
    const found = await load(`api/runs/${run.index}/transcript?${words}`);
    if (asked !== this.asked) return;
    this.found = found.refused ? null : found;
    if (found.refused) this.body.replaceChildren(h("p", { class: "quiet" }, found.refused));
    else this.draw();
  }

  colour(mode) {
    this.mode = mode ?? MODES[(MODES.indexOf(this.mode) + 1) % MODES.length];
    if (this.found) this.draw();
  }

  draw() {
    const t = this.found;
    for (const button of this.choice.children) button.setAttribute("aria-checked", String(button.dataset.mode === this.mode));
    const facts = [["sample", t.sample], ["step", t.step ?? "none"], ["node", t.node_id], ["reward", number(t.reward)], ["advantage", number(t.advantage)], ["stop", t.stop_reason], ["kept as", t.why.join(", ")], ...Object.entries(t.metrics).map(([k, v]) => [k, number(v)]), ...Object.entries(t.notes ?? {})];
    const versions = [...new Set(t.turns.flatMap((turn) => turn.version_runs.map(([, version]) => version)))].sort((a, b) => a - b);
    const keys = { version: versions.map((v, i) => [`v${i % 8}`, `version ${v}`]), ratio: RATIOS.map(([, name, text]) => [name, text]), mask: [["m1", "in the loss"], ["m0", "not in the loss"]] }[this.mode];
    this.body.replaceChildren(
      h("dl", { class: "line-up" }, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))])),
      t.error ? h("p", { class: "urgent" }, `failed: ${t.error}`) : "",
      h("p", { class: "legend" }, keys.map(([name, text]) => h("span", { class: `token ${name}` }, text))),
      ...t.turns.map((turn) => this.turn(turn, versions)),
      t.cut ? h("p", { class: "quiet" }, `${number(t.cut)} tokens are not shown, because the transcript is too long.`) : "");
  }

  turn(turn, versions) {
    const policy = turn.author === "policy";
    const runs = turn.version_runs;
    let at = -1;
    const tokens = turn.pieces.map((piece, i) => {
      while (at + 1 < runs.length && runs[at + 1][0] <= i) at += 1;
      const version = at >= 0 ? runs[at][1] : null;
      const trained = turn.trained[i], ratio = turn.ratios[i];
      let name = "";
      if (policy && this.mode === "version" && version !== null) name = `v${versions.indexOf(version) % 8}`;
      if (policy && this.mode === "ratio" && typeof ratio === "number") name = RATIOS.find(([bound]) => ratio <= bound)[1];
      if (this.mode === "mask") name = trained ? "m1" : "m0";
      const known = policy ? [`token ${turn.tokens[i]}`, version !== null && `version ${version}`, typeof turn.logprobs[i] === "number" && `log-probability ${number(turn.logprobs[i])}`, typeof ratio === "number" && `ratio ${number(ratio)}`, trained !== undefined && (trained ? "in the loss" : "not in the loss")].filter(Boolean).join(", ") : null;
      return h("span", { class: `token ${name}`, title: known }, piece);
    });
    const reward = turn.reward === null || turn.reward === undefined ? "" : `, reward ${number(turn.reward)}`;
    return h("article", { class: `turn ${turn.author}` },
      turn.cut_before ? h("p", { class: "quiet" }, `${number(turn.cut_before)} tokens were left out here.`) : "",
      h("h3", {}, `${turn.path ? `branch ${turn.path}, ` : ""}${turn.name ? `${turn.name}, ` : ""}${turn.author}, ${number(turn.tokens.length || tokens.length)} tokens${reward}`), h("pre", {}, tokens.length ? tokens : turn.text));
  }
}
