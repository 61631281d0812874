// Vercel's AI SDK: chats and responses of @ai-sdk/openai, chats of @ai-sdk/openai-compatible.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateObject, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { assert, baseURL, check, MODEL, run, SAID, SUNNY } from "./checks.mjs";

const openai = createOpenAI({ baseURL, apiKey: "unused" });
const compatible = createOpenAICompatible({
  name: "tsqp", baseURL, includeUsage: true, supportsStructuredOutputs: true,
});
const City = z.object({ name: z.string(), people: z.number().int() });
const prompt = "How is the weather?";
const weather = tool({
  description: "Says the weather.",
  inputSchema: z.object({ city: z.string() }),
  execute: async () => SUNNY,
});
const tools = { weather };
const models = {
  "openai.chat": openai.chat(MODEL),
  "openai.responses": openai.responses(MODEL),
  "openai-compatible": compatible.chatModel(MODEL),
};

for (const [name, model] of Object.entries(models)) {
  const given = { model, maxRetries: 0, prompt };
  const store = name === "openai.responses" ? { openai: { store: false } } : {};

  check(`${name}: generateText`, async () => assert.equal((await generateText(given)).text, SAID));

  check(`${name}: generateText with tools`, async () => {
    const done = await generateText({ ...given, tools, stopWhen: stepCountIs(3), providerOptions: store });
    assert.equal(done.text, `The tool says: ${SUNNY}`);
  });

  check(`${name}: streamText with tools`, async () => {
    let failed;
    const onError = ({ error }) => { failed = error; };
    const done = streamText({
      ...given, tools, stopWhen: stepCountIs(3), onError, providerOptions: store,
    });
    const text = await done.text.catch((error) => { throw failed ?? error; });
    assert.equal(text, `The tool says: ${SUNNY}`);
    assert.ok((await done.totalUsage).inputTokens > 0);
  });

  check(`${name}: generateObject`, async () => {
    City.parse((await generateObject({ ...given, schema: City })).object);
  });

  check(`${name}: Output.object`, async () => {
    City.parse((await generateText({ ...given, output: Output.object({ schema: City }) })).output);
  });
}

check("openai-compatible: reasoning", async () => {
  const providerOptions = { tsqp: { reasoningEffort: "low" } };
  const done = await generateText({ model: models["openai-compatible"], prompt, providerOptions });
  assert.equal(done.reasoningText, "What was asked is plain.");
});

for (const [name, model] of Object.entries({
  "openai": openai.embedding(MODEL), "openai-compatible": compatible.embeddingModel(MODEL),
})) {
  check(`${name}: embed`, async () => assert.equal((await embed({ model, value: "a" })).embedding.length, 3));
}

await run("ai");
