// The server's state, once a second while somebody looks: charts, pauses, whether it is there.

const PERIOD_MS = 1000;
const WAIT_MS = 5000; // for an answer
const LEAST_SPAN_MS = 20000, SPAN_MS = 120000; // of a chart
const WIDTH = 240, HEIGHT = 56; // of a chart's viewBox

function rounded(value) {
  if (value >= 100) return Math.round(value).toLocaleString("en");
  return `${Number(value.toPrecision(3))}`;
}

function percent(value) {
  return `${(value * 100).toFixed(1)} %`;
}

// What a chart shows of a load of /v1/loads, and the least value at its top.
const CHARTS = [
  {title: "Tokens/s", valueOf: (load) => load.gen_throughput, least: 10},
  {title: "Running requests", valueOf: (load) => load.num_running_reqs, least: 4},
  {title: "Waiting requests", valueOf: (load) => load.num_waiting_reqs, least: 4},
  {title: "KV use", valueOf: (load) => load.token_usage, least: 0.1, text: percent},
  {title: "Accept length", valueOf: (load) => (load.speculative || {}).accept_length, least: 2},
  {title: "Tier: drafts", valueOf: (load) => (load.speculative || {}).num_steps, least: 4},
].map((chart) => new Chart(chart));

function Chart({title, valueOf, least, text = rounded}) {
  const figure = element("chart-template").content.cloneNode(true).firstElementChild;
  const find = (selector) => figure.querySelector(selector);
  const points = []; // {time, value}; no value: a gap
  find("figcaption").textContent = title;
  element("charts").append(figure);

  this.add = (load) => {
    const now = Date.now();
    const value = load === null ? null : valueOf(load);
    points.push({time: now, value: Number.isFinite(value) ? value : null});
    while (points[0].time < now - SPAN_MS) points.shift();
    const most = points.reduce((found, point) => Math.max(found, point.value || 0), least);
    const span = Math.max(now - points[0].time, LEAST_SPAN_MS);
    const shown = Number.isFinite(value) ? text(value) : "–";
    find("strong").textContent = shown;
    find("svg").setAttribute("aria-label", `${title}, the last two minutes; now ${shown}`);
    find(".most").textContent = text(most);
    const pieces = piecesOf(points).map((piece) => piece.map(({time, value: y}) => [
      (WIDTH * (1 - (now - time) / span)).toFixed(1),
      (HEIGHT - 2 - (HEIGHT - 4) * y / most).toFixed(1),
    ]));
    const lines = pieces.map((piece) => `M${piece.map((point) => point.join(" ")).join("L")}`);
    find(".line").setAttribute("d", lines.join(""));
    find(".area").setAttribute("d", pieces.map((piece, i) =>
      `${lines[i]}L${piece[piece.length - 1][0]} ${HEIGHT}L${piece[0][0]} ${HEIGHT}Z`).join(""));
  };
}

// Points between two gaps: without a value, or where nobody looked.
function piecesOf(points) {
  const pieces = [[]];
  let last = -Infinity;
  for (const point of points) {
    if (point.value === null || point.time - last > 3 * PERIOD_MS) pieces.push([]);
    if (point.value !== null) pieces[pieces.length - 1].push(point);
    last = point.time;
  }
  return pieces.filter((piece) => piece.length);
}

let lostSince = null; // when the server did not answer for the first time
let isKnown = false; // whether this page has asked what is served
let timer = null;

async function poll() {
  clearTimeout(timer);
  timer = null;
  try {
    const response = await call("v1/loads", {signal: AbortSignal.timeout(WAIT_MS)});
    const load = (await response.json()).loads[0];
    if (!isKnown) await learn();
    CHARTS.forEach((chart) => chart.add(load));
    notePresence(load);
  } catch (error) {
    CHARTS.forEach((chart) => chart.add(null));
    if (error instanceof Refusal && error.status !== 503) {
      show(element("status"), error.status === 401 ? "Needs the API key" : "Refused", "wait");
      show(element("notice"), error.message, "bad");
    } else {
      noteAbsence(error);
    }
  }
  if (!document.hidden && timer === null) timer = setTimeout(poll, PERIOD_MS);
}

function notePresence(load) {
  if (lostSince !== null) {
    const seconds = Math.max(1, Math.round((Date.now() - lostSince) / 1000));
    show(element("notice"), `The server answers again, after ${seconds} s.`, "good");
    lostSince = null;
  } else if (element("notice").dataset.state === "bad") {
    show(element("notice"), "");
  }
  const age = load.state_age_s || 0;
  const text = load.paused ? "Paused" : age > 3 ? `Stopped for ${Math.round(age)} s` : "Ready";
  show(element("status"), text, text === "Ready" ? "good" : "wait");
}

function noteAbsence(error) {
  if (lostSince === null) lostSince = Date.now();
  isKnown = false; // another server may come back
  const isStarting = error instanceof Refusal;
  show(element("status"), isStarting ? error.message : "No answer", isStarting ? "wait" : "bad");
  const text = isStarting ? error.message : "The server does not answer.";
  show(element("notice"), `${text} This page tries again every second.`, "bad");
}

// Asks what is served, and what of the playground that has a use for.
async function learn() {
  const info = await (await call("server_info", {signal: AbortSignal.timeout(WAIT_MS)})).json();
  element("model").textContent = info.served_model_name;
  const predicts = !info.speculative_algorithm && info.resolved.num_draft_tokens > 1;
  element("prediction-field").hidden = !predicts;
  const choice = element("prediction");
  const sizes = choice.options.length === 3 ? [2, 4, 8, 16, 32] : []; // once
  for (const k of sizes.filter((size) => size <= info.mtp_max_k)) {
    add(choice, "option", `up to ${k} tokens a step, verified`).value = k;
    choice.value = k;
  }
  isKnown = true;
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && timer === null) poll();
});
element("api-key").addEventListener("change", poll);
