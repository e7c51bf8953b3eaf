"""The page at /docs: it lists the endpoints of /openapi.json, and needs nothing from elsewhere."""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Ringcast API</title>
<style>
  :root { color-scheme: light dark; }
  body { font: 15px/1.5 system-ui, sans-serif; }
  body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
  details { border-top: 1px solid #8884; padding: .5rem 0; }
  summary { cursor: pointer; }
  code, pre { font-family: ui-monospace, monospace; font-size: 13px; }
  .method { display: inline-block; width: 4em; font-weight: 600; }
  .note { opacity: .7; }
  table { border-collapse: collapse; margin: .5rem 0 1rem; }
  th, td { text-align: left; padding: .1rem 1.5rem .1rem 0; vertical-align: top; }
</style>
</head>
<body>
<h1>Ringcast API</h1>
<p class="note" id="about">Reads <a href="openapi.json">openapi.json</a>.</p>
<main></main>
<script>
"use strict";
const make = (name, text, parent, kind) => {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  if (parent) parent.append(element);
  return element;
};
const nameOf = (schema) => schema.$ref ? schema.$ref.split("/").pop() : "";
const typeOf = (schema) => {
  if (schema.$ref) return nameOf(schema);
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.type === "array") return "list of " + (schema.items ? typeOf(schema.items) : "any");
  return schema.type || "any";
};
// What an event's data is, of a stream.
const eventOf = (schema) => {
  const data = schema.properties.data;
  const inner = (data.anyOf ? data.anyOf[0] : data).contentSchema;
  return inner.anyOf ? inner.anyOf[0] : inner;
};
const showSchema = (title, schema, components, parent, seen) => {
  const name = nameOf(schema);
  const inner = name ? components[name] : schema;
  if (!inner || seen.has(name)) return;
  seen.add(name);
  make("h4", title + (name ? ": " + name : ""), parent);
  if (inner.description) make("p", inner.description, parent, "note");
  const table = make("table", undefined, parent);
  for (const [field, type] of Object.entries(inner.properties || {})) {
    const row = make("tr", undefined, table);
    make("code", field, make("td", undefined, row));
    make("td", typeOf(type), row);
    const needed = (inner.required || []).includes(field);
    const fixed = "default" in type ? "default " + JSON.stringify(type.default) : "";
    make("td", needed ? "required" : fixed, row, "note");
  }
};
const show = (document_) => {
  const main = document.querySelector("main");
  const components = document_.components.schemas;
  make("span", " Version " + document_.info.version + ".", document.getElementById("about"));
  for (const [path, methods] of Object.entries(document_.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const details = make("details", undefined, main);
      const summary = make("summary", undefined, details);
      make("span", method.toUpperCase(), summary, "method");
      make("code", path, summary);
      make("span", " " + operation.summary, summary, "note");
      const seen = new Set();
      for (const media of Object.values(operation.requestBody?.content || {}))
        showSchema("Body", media.schema, components, details, seen);
      for (const [status, answer] of Object.entries(operation.responses))
        for (const [kind, media] of Object.entries(answer.content || {}))
          showSchema(status + ", " + kind,
            kind === "text/event-stream" ? eventOf(media.schema) : media.schema,
            components, details, seen);
    }
  }
};
fetch("openapi.json")
  .then((answer) => answer.ok ? answer.json() : Promise.reject(answer.status))
  .then(show)
  .catch((reason) => { document.querySelector("main").textContent = "openapi.json: " + reason; });
</script>
</body>
</html>
"""
