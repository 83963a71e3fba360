"use strict";

function element(id) {
  return document.getElementById(id);
}

// A new element of a name with a text, in a parent.
function add(parent, name, text = "", className = "") {
  const child = document.createElement(name);
  child.textContent = text;
  child.className = className;
  parent.append(child);
  return child;
}

// Shows a text in a line that is hidden without one. What stays is left, so it is read out once.
function show(line, text, state = "") {
  if (line.textContent !== text) line.textContent = text;
  line.dataset.state = state;
  line.hidden = !text;
}

// An answer of the server that is no success.
class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function messageOf(status, text) {
  try {
    const body = JSON.parse(text);
    return body.error.message || `The server answered ${status}.`;
  } catch {
    return text.trim() || `The server answered ${status}.`;
  }
}

// The keys are read from their fields for each call, and are nowhere else.
function authorization(isAdmin) {
  const key = (isAdmin && element("admin-key").value) || element("api-key").value;
  if (!key) return {};
  const bytes = new TextEncoder().encode(key.trim());
  return {Authorization: `Bearer ${String.fromCharCode(...bytes)}`};
}

// Asks a route, by its path without the first slash: the page may lie below a proxy's path.
// Throws a Refusal, or what `fetch` throws where nobody answers.
async function call(path, {body, isAdmin = false, method = "GET", signal} = {}) {
  const headers = authorization(isAdmin);
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const text = body === undefined ? undefined : JSON.stringify(body);
  const response = await fetch(path, {
    method, headers, body: text, signal, cache: "no-store", credentials: "omit", redirect: "error",
  });
  if (response.ok) return response;
  if (response.status === 401) element("keys").open = true;
  throw new Refusal(response.status, messageOf(response.status, await response.text()));
}

// The data of each server-sent event.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ")) yield event.slice(6);
    }
  }
}
