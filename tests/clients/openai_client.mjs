// OpenAI's own client for Node.

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { assert, baseURL, check, MODEL, PARAMETERS, run, SAID, SUNNY, USER, WEATHER } from "./checks.mjs";

const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const City = z.object({ name: z.string(), people: z.number().int(), rivers: z.array(z.string()) });
const flat = { type: "function", name: "weather", parameters: PARAMETERS, strict: true };

check("chat", async () => {
  const answer = await client.chat.completions.create({ model: MODEL, messages: USER });
  assert.equal(answer.choices[0].message.content, SAID);
  assert.ok(answer._request_id);
});

check("chat, streamed", async () => {
  const stream = client.chat.completions.stream({ model: MODEL, messages: USER });
  assert.equal(await stream.finalContent(), SAID);
});

check("chat.completions.parse", async () => {
  const answer = await client.chat.completions.parse({
    model: MODEL, messages: USER, response_format: zodResponseFormat(City, "city"),
  });
  City.parse(answer.choices[0].message.parsed);
});

check("chat.completions.parse: its turn is sent back", async () => {
  const given = { model: MODEL, messages: [...USER], response_format: zodResponseFormat(City, "city") };
  const first = await client.chat.completions.parse(given);
  given.messages.push(first.choices[0].message, ...USER);
  City.parse((await client.chat.completions.parse(given)).choices[0].message.parsed);
});

check("responses.parse: its items are sent back", async () => {
  const given = { model: MODEL, input: [...USER], text: { format: zodTextFormat(City, "city") } };
  const first = await client.responses.parse(given);
  given.input.push(...first.output, ...USER);
  City.parse((await client.responses.parse(given)).output_parsed);
});

for (const stream of [false, true]) {
  check(stream ? "runTools, streamed" : "runTools", async () => {
    const tool = { type: "function", function: { ...WEATHER.function, function: () => SUNNY, parse: JSON.parse } };
    const runner = client.chat.completions.runTools({ model: MODEL, messages: USER, tools: [tool], stream });
    assert.equal(await runner.finalContent(), `The tool says: ${SUNNY}`);
  });
}

check("responses", async () => {
  assert.equal((await client.responses.create({ model: MODEL, input: "Hello" })).output_text, SAID);
  const parsed = await client.responses.parse({
    model: MODEL, input: "Hello", text: { format: zodTextFormat(City, "city") },
  });
  City.parse(parsed.output_parsed);
});

check("responses, streamed", async () => {
  const stream = client.responses.stream({ model: MODEL, input: "Hello", reasoning: { effort: "low" } });
  assert.equal((await stream.finalResponse()).output_text, SAID);
});

check("responses, with tools", async () => {
  const input = [{ role: "user", content: "How is the weather?" }];
  const first = await client.responses.stream({ model: MODEL, input, tools: [flat] }).finalResponse();
  const [call] = first.output;
  input.push(...first.output, { type: "function_call_output", call_id: call.call_id, output: SUNNY });
  const second = await client.responses.create({ model: MODEL, input, tools: [flat] });
  assert.equal(second.output_text, `The tool says: ${SUNNY}`);
});

check("embeddings", async () => {
  const found = await client.embeddings.create({ model: MODEL, input: "a cat" });
  assert.equal(found.data[0].embedding.length, 3);
});

await run("openai");
