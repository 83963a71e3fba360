// The routes of /openapi.json.

let api = null;

async function loadOperations() {
  if (api !== null) return;
  try {
    api = await (await call("openapi.json")).json();
    show(element("operations-problem"), "");
    drawOperations();
  } catch (error) {
    show(element("operations-problem"), `/openapi.json: ${error.message}`, "bad");
  }
}

function drawOperations() {
  const wanted = element("filter").value.trim().toLowerCase();
  const list = element("operation-list");
  list.replaceChildren();
  for (const [path, operations] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const summary = operation.description || operation.summary || "";
      if (`${path} ${summary}`.toLowerCase().includes(wanted)) {
        drawOperation(list, path, method, operation, summary);
      }
    }
  }
  if (!list.childElementCount) add(list, "p", "No route has that.", "quiet");
}

function drawOperation(list, path, method, operation, summary) {
  const details = add(list, "details");
  const line = add(details, "summary");
  add(line, "span", method.toUpperCase(), "method");
  line.append(" ");
  add(line, "code", path);
  line.append(" ");
  add(line, "span", summary.split("\n")[0], "quiet");
  details.addEventListener("toggle", () => {
    if (details.childElementCount === 1) describeOperation(details, operation, summary);
  });
}

function describeOperation(place, operation, summary) {
  if (summary.includes("\n")) add(place, "p", summary, "text");
  const parameters = operation.parameters || [];
  const fields = parameters.map((each) => [each.name, each.schema, each.required]);
  if (fields.length) drawFields(place, "In the path or the query", fields);
  const content = ((operation.requestBody || {}).content || {})["application/json"];
  if (content) drawSchema(place, "Body", content.schema, new Set());
  const answers = Object.entries(operation.responses || {});
  drawTable(place, "Answers", answers.map(([code, answer]) => [code, answer.description || ""]));
}

// Draws the fields of a schema, and behind them those of each schema that they name.
function drawSchema(place, title, schema, drawn) {
  const found = resolve(schema);
  const required = new Set(found.required || []);
  if (found.description) add(place, "p", found.description, "text");
  const properties = Object.entries(found.properties || {});
  const fields = properties.map(([name, each]) => [name, each, required.has(name)]);
  if (fields.length) drawFields(place, title, fields);
  for (const [, each] of properties) {
    for (const name of namesIn(each)) {
      if (drawn.has(name)) continue;
      drawn.add(name);
      drawSchema(place, name, api.components.schemas[name], drawn);
    }
  }
}

function drawFields(place, title, fields) {
  drawTable(place, title, fields.map(([name, schema, isRequired]) => {
    const value = schema && schema.default;
    const rest = value === undefined ? "" : `default ${JSON.stringify(value)}`;
    const text = (schema && schema.description) || "";
    return [name, typeOf(schema), isRequired ? "required" : rest, text];
  }));
}

function drawTable(place, title, rows) {
  add(place, "h3", title);
  const body = add(add(place, "table"), "tbody");
  for (const [head, ...cells] of rows) {
    const row = add(body, "tr");
    add(add(row, "th"), "code", head).parentElement.scope = "row";
    cells.forEach((cell) => add(row, "td", cell));
  }
}

function nameOf(reference) {
  return reference.split("/").pop();
}

function resolve(schema) {
  return schema.$ref ? api.components.schemas[nameOf(schema.$ref)] || {} : schema;
}

function partsOf(schema) {
  const items = schema.items ? [schema.items] : [];
  return [...(schema.anyOf || []), ...(schema.oneOf || []), ...(schema.allOf || []), ...items];
}

function namesIn(schema) {
  if (schema.$ref) return [nameOf(schema.$ref)];
  return partsOf(schema).flatMap(namesIn);
}

function typeOf(schema) {
  if (!schema) return "any";
  if (schema.$ref) return nameOf(schema.$ref);
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" or ");
  const others = schema.anyOf || schema.oneOf;
  if (others) return others.map(typeOf).join(" or ");
  const type = [].concat(schema.type || "any").join(" or ");
  return schema.items ? `list of ${typeOf(schema.items)}` : type;
}

function showView(isOperations) {
  element("operations").hidden = !isOperations;
  element("playground").hidden = isOperations;
  element("show-operations").setAttribute("aria-pressed", isOperations);
  element("show-playground").setAttribute("aria-pressed", !isOperations);
  if (isOperations) loadOperations();
}

element("filter").addEventListener("input", () => api && drawOperations());
element("show-operations").addEventListener("click", () => showView(true));
element("show-playground").addEventListener("click", () => showView(false));
element("api-key").addEventListener("change", () => {
  if (!element("operations").hidden) loadOperations();
});
showView(location.pathname.endsWith("/docs"));
poll();
