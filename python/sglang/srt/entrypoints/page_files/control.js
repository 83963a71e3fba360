// What the admin may do.

async function control(path, body) {
  const buttons = ["pause", "continue", "flush"].map(element);
  const answer = element("control-answer");
  buttons.forEach((button) => { button.disabled = true; });
  show(answer, "Waiting for the answer …");
  try {
    const text = await (await call(path, {method: "POST", body, isAdmin: true})).text();
    show(answer, summaryOf(text));
  } catch (error) {
    show(answer, error instanceof TypeError ? "The server does not answer." : error.message);
  }
  buttons.forEach((button) => { button.disabled = false; });
  poll();
}

function summaryOf(text) {
  try {
    const {message} = JSON.parse(text);
    return message || text;
  } catch {
    return text.split("\n")[0];
  }
}

element("pause").addEventListener("click",
  () => control("pause_generation", {mode: element("pause-mode").value}));
element("continue").addEventListener("click", () => control("continue_generation", {}));
element("flush").addEventListener("click", () => control("flush_cache"));
