// A stream: its outputs, each with the runs that steps gave, and the messages of a chat.

const MOST_TOKENS = 8; // that have a colour of their own
const CUT_OFF = "The stream was cut off: the server is gone or was restarted. Send it again.";
const messages = []; // of the chat so far
let running = null; // the AbortController of the stream

for (let tokens = 1; tokens <= MOST_TOKENS; tokens++) {
  const sample = add(element("legend"), "span", tokens < MOST_TOKENS ? `${tokens}` : "8+", "run");
  sample.dataset.tokens = tokens;
}

// One output on the screen.
class Output {
  constructor(index) {
    const article = element("output-template").content.cloneNode(true).firstElementChild;
    this.title = article.querySelector("h3");
    this.place = article.querySelector("pre");
    this.place.setAttribute("aria-label", `Output ${index + 1}`);
    element("outputs").append(article);
    this.name = `#${index + 1}`;
    this.text = "";
    this.numTokens = this.numSteps = 0;
    this.numTold = 0; // steps of which /generate has told
    this.start = performance.now();
    this.end = "";
    this.runs = [];
  }

  // Takes in what one event brought: mostly one step; more, where the page was slower.
  addRun(text, numTokens, numSteps, isReasoning = false) {
    draw(this);
    if (!text && !numTokens) return;
    if (!isReasoning) this.text += text;
    this.numTokens += numTokens;
    this.numSteps += numSteps;
    this.runs.push({text, numTokens, numSteps, isReasoning});
    this.lastNews = performance.now();
  }

  draw() {
    const place = this.place;
    const follows = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
    for (const {text, numTokens, numSteps, isReasoning} of this.runs.splice(0)) {
      const run = add(place, "span", text, isReasoning ? "run reasoning" : "run");
      const perStep = Math.round(numTokens / Math.max(numSteps, 1));
      run.dataset.tokens = Math.min(Math.max(perStep, 1), MOST_TOKENS);
      const tokens = numTokens === 1 ? "1 token" : `${numTokens} tokens`;
      run.title = numSteps > 1 ? `${tokens} of ${numSteps} steps` : tokens;
    }
    if (follows) place.scrollTop = place.scrollHeight;
    const seconds = (this.lastNews - this.start) / 1000;
    const parts = [this.name, `${this.numTokens} tokens`];
    if (this.numSteps) parts.push(`${(this.numTokens / this.numSteps).toFixed(2)} per step`);
    if (seconds > 0) parts.push(`${Math.round(this.numTokens / seconds)} tokens/s`);
    if (this.end) parts.push(this.end);
    this.title.textContent = parts.join(" · ");
  }
}

// Draws outputs with the next frame, however many events come before it.
const toDraw = new Set();
function draw(output) {
  if (!toDraw.size) {
    requestAnimationFrame(() => {
      const outputs = [...toDraw];
      toDraw.clear();
      outputs.forEach((each) => each.draw());
    });
  }
  toDraw.add(output);
}

// One event of /generate holds the whole output so far.
function readGenerate(event, output) {
  const meta = event.meta_info;
  const numTokens = meta.completion_tokens - output.numTokens;
  // Steps without drafts are not told, unless in mtp_effective_k; each is an event of its own.
  const told = meta.mtp_effective_k ? meta.mtp_effective_k.length : meta.spec_verify_ct || 0;
  const numSteps = numTokens ? Math.max(told - output.numTold, 1) : 0;
  output.numTold = told;
  output.end = meta.finish_reason ? meta.finish_reason.type : "";
  output.addRun((event.text || "").slice(output.text.length), numTokens, numSteps);
}

// One event of a chat holds what is new.
function readChat(choice, usage, output) {
  const delta = choice.delta || {};
  const numTokens = usage ? usage.completion_tokens - output.numTokens : 0;
  output.end = choice.finish_reason || "";
  if (delta.reasoning_content) {
    output.addRun(delta.reasoning_content, numTokens, 1, true);
  } else {
    output.addRun(delta.content || "", numTokens, numTokens ? 1 : 0);
  }
}

function numberIn(id) {
  const field = element(id);
  if (!field.checkValidity() || Number.isNaN(field.valueAsNumber)) {
    const reason = field.validationMessage || "Please enter a number.";
    throw new Error(`${field.labels[0].textContent.trim()}: ${reason}`);
  }
  return field.valueAsNumber;
}

function extraParameters() {
  const text = element("extra").value.trim();
  if (!text) return {};
  let extra;
  try {
    extra = JSON.parse(text);
  } catch (error) {
    throw new Error(`More parameters: ${error.message}`);
  }
  if (extra === null || typeof extra !== "object" || Array.isArray(extra)) {
    throw new Error("More parameters: a JSON object is wanted.");
  }
  return extra;
}

function prediction() {
  const {value, lastElementChild: largest} = element("prediction");
  if (element("prediction-field").hidden || value === "server") return {};
  if (value === "off") return {mtp_enabled: false};
  if (value === "confident") {
    return {mtp_enabled: true, mtp_strategy: ["conf_adapt", 0.9], mtp_k: Number(largest.value)};
  }
  return {mtp_enabled: true, mtp_verify: true, mtp_k: Number(value)};
}

// The route and the body of what is on the screen.
function requestOf(isChat) {
  const settings = {temperature: numberIn("temperature"), n: numberIn("streams")};
  const numTokens = numberIn("max-tokens");
  if (!isChat) {
    const params = {...settings, max_new_tokens: numTokens, ...prediction(), ...extraParameters()};
    return ["generate", {text: element("prompt").value, stream: true, sampling_params: params}];
  }
  const body = {
    model: element("model").textContent || "default",
    messages,
    stream: true,
    max_tokens: numTokens,
    ...settings,
    stream_options: {include_usage: true, continuous_usage_stats: true},
  };
  if (Object.keys(prediction()).length) body.custom_params = prediction();
  return ["v1/chat/completions", {...body, ...extraParameters()}];
}

// Reads a stream to its end. Throws if it has none.
async function readStream(response, isChat, outputs) {
  const outputOf = (index) => (outputs[index] = outputs[index] || new Output(index));
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    if (!isChat) readGenerate(event, outputOf(event.index || 0));
    else for (const choice of event.choices) readChat(choice, event.usage, outputOf(choice.index));
  }
  throw new Error(CUT_OFF);
}

function addMessage(role, content) {
  messages.push({role, content});
  const line = add(element("conversation"), "pre", content);
  line.dataset.role = role;
  line.setAttribute("aria-label", role);
}

function isChatChosen() {
  return element("route").value === "chat";
}

async function send() {
  if (running) return;
  const isChat = isChatChosen();
  const outputs = [];
  running = new AbortController();
  setRunning(true);
  show(element("problem"), "");
  try {
    const prompt = element("prompt").value;
    // A message that failed is sent again with the field left empty.
    if (isChat && (prompt || !messages.length)) {
      addMessage("user", prompt);
      element("prompt").value = "";
    }
    const [path, body] = requestOf(isChat);
    element("outputs").replaceChildren();
    const response = await call(path, {method: "POST", body, signal: running.signal});
    await readStream(response, isChat, outputs);
    if (isChat && outputs[0]) addMessage("assistant", outputs[0].text);
  } catch (error) {
    const wasStopped = running.signal.aborted;
    for (const output of outputs) {
      if (output && !output.end) output.end = wasStopped ? "stopped" : "cut off";
      if (output) draw(output);
    }
    if (!wasStopped) show(element("problem"), problemOf(error), "bad");
    poll(); // the server may be gone
  }
  running = null;
  setRunning(false);
}

function problemOf(error) {
  return error instanceof TypeError ? CUT_OFF : error.message; // `fetch`: nobody answers any more
}

function setRunning(isRunning) {
  element("send").disabled = isRunning;
  element("stop").disabled = !isRunning;
}

function clearAll() {
  if (running) running.abort();
  messages.length = 0;
  element("conversation").replaceChildren();
  element("outputs").replaceChildren();
  show(element("problem"), "");
}

function showRoute() {
  const isChat = isChatChosen();
  element("conversation").hidden = !isChat;
  element("prompt-label").textContent = isChat ? "Message" : "Prompt";
  element("send").textContent = isChat ? "Send" : "Generate";
  element("extra-place").textContent = isChat ? "the body" : "sampling_params";
}

element("send").addEventListener("click", send);
element("stop").addEventListener("click", () => running && running.abort());
element("clear").addEventListener("click", clearAll);
element("route").addEventListener("change", showRoute);
element("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
});
showRoute();
