// The chat of the server's own page: sends the conversation, shows the answer as it streams.
"use strict";
const log = document.getElementById("log");
const form = document.getElementById("ask");
const text = document.getElementById("text");
const stop = document.getElementById("stop");
const key = document.getElementById("key"); // null where the server needs none
const messages = [];
let running = null;

function show(role, content) {
  const row = document.createElement("p");
  row.className = role;
  row.textContent = content;
  log.append(row);
  row.scrollIntoView({ block: "nearest" });
  return row;
}

// Yields the objects of a stream of server-sent events.
async function* events(body) {
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function answer(row) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key.value}`;
  const body = JSON.stringify({ messages, stream: true });
  const request = { method: "POST", headers, body, signal: running.signal };
  const response = await fetch("/v1/chat/completions", request);
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    const delta = event.choices.length ? event.choices[0].delta : {};
    if (delta.content) row.textContent += delta.content;
    row.scrollIntoView({ block: "nearest" });
  }
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const question = text.value.trim();
  if (!question || running) return;
  text.value = "";
  messages.push({ role: "user", content: question });
  show("user", question);
  const row = show("assistant", "");
  running = new AbortController();
  stop.disabled = false;
  try {
    await answer(row);
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  }
  messages.push({ role: "assistant", content: row.textContent });
  running = null;
  stop.disabled = true;
  text.focus();
});

stop.addEventListener("click", () => running && running.abort());
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});
