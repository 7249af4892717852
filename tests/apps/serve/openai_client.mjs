// Asks a server everything that OpenAI's own Node client asks, and prints what it understood.
// Usage: node openai_client.mjs NODE_MODULES BASE_URL
import { createRequire } from "node:module";

const [folder, baseURL] = process.argv.slice(2);
const OpenAI = createRequire(import.meta.url)(`${folder}/openai`);
const connect = (settings) =>
  new OpenAI({ baseURL, apiKey: "right", maxRetries: 0, ...settings });
const client = connect({});
const model = (await client.models.list()).data[0].id;
const asked = { model, messages: [{ role: "user", content: "Größe 🎉" }], seed: 7, max_tokens: 6 };

const whole = await client.chat.completions.create({ ...asked, n: 3, temperature: 1.5 });

const streamed = { roles: [], texts: ["", "", ""], reasons: [], usages: [], ids: new Set() };
const stream = await client.chat.completions.create({
  ...asked,
  n: 3,
  temperature: 1.5,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed.ids.add(chunk.id);
  if (chunk.usage) streamed.usages.push(chunk.usage);
  for (const { index, delta, finish_reason } of chunk.choices) {
    if (delta.role) streamed.roles.push(delta.role);
    streamed.texts[index] += delta.content ?? "";
    if (finish_reason) streamed.reasons.push(finish_reason);
  }
}

const ranked = await client.chat.completions.create({
  ...asked,
  temperature: 0,
  logprobs: true,
  top_logprobs: 2,
});
const completed = await client.completions.create({
  model,
  prompt: "The quick",
  max_tokens: 5,
  temperature: 0,
  logprobs: 3,
});

// Forms and calls.
const schema = {
  type: "object",
  properties: { city: { enum: ["Paris", "Zürich"] }, days: { enum: [1, 2, 3] } },
  required: ["city", "days"],
  additionalProperties: false,
};
const held = await client.chat.completions.create({
  ...asked,
  max_tokens: 200,
  n: 2,
  temperature: 1.5,
  presence_penalty: 0.5,
  frequency_penalty: 0.5,
  response_format: { type: "json_schema", json_schema: { name: "trip", schema, strict: true } },
});
const called = { model, messages: asked.messages, seed: 7, tool_choice: "required" };
called.tools = [{ type: "function", function: { name: "weather", parameters: schema } }];
called.parallel_tool_calls = false;
const calls = (await client.chat.completions.create(called)).choices[0];
const runner = client.chat.completions.stream(called);
const finalCalls = (await runner.finalChatCompletion()).choices[0];

// A client that stops reading: the server must notice, not the next request.
const left = await client.chat.completions.create({ ...asked, max_tokens: 400, stream: true });
for await (const _ of left) break;

const errors = {};
const failing = {
  NotFoundError: () => client.models.retrieve("other"),
  BadRequestError: () => client.completions.create({ model, prompt: "hi", temperature: -1 }),
  AuthenticationError: () =>
    connect({ apiKey: "wrong" }).completions.create({ model, prompt: "hi" }),
};
for (const [name, fails] of Object.entries(failing)) {
  try {
    await fails();
    errors[name] = "nothing was thrown";
  } catch (error) {
    errors[name] = error instanceof OpenAI[name] ? error.type : String(error);
  }
}

console.log(
  JSON.stringify({
    model,
    whole,
    streamed: { ...streamed, ids: streamed.ids.size },
    ranked: ranked.choices[0],
    completed,
    held: held.choices,
    calls,
    finalCalls,
    errors,
  }),
);
