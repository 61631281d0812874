// What the programs of this folder for Node have in common: see checks.py.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

export const baseURL = `${process.argv[2]}/v1`;
export const MODEL = "demo";
export const SAID = "The cat sat on the mat, and looked at a bird.";
export const USER = [{ role: "user", content: "How is the weather?" }];
export const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
export const WEATHER = {
  type: "function",
  function: { name: "weather", description: "Says the weather.", parameters: PARAMETERS },
};
export const SUNNY = "sunny in Paris";
export { assert };

const checks = [];

// Register a check: a function that raises, or whose promise does, what is wrong.
export function check(name, one) {
  checks.push([name, one]);
}

// Run all checks of a program, and print a line for each. `place`: whose version counts.
export async function run(place) {
  const { version } = JSON.parse(readFileSync(new URL(`node_modules/${place}/package.json`, import.meta.url)));
  for (const [name, one] of checks) {
    if (process.env.ONLY && !name.includes(process.env.ONLY)) continue;
    let reason = "";
    try {
      await one();
    } catch (error) {
      reason = `${error?.name}: ${error?.message} ${error?.responseBody ?? ""}`;
    }
    reason = reason.replaceAll(/\s+/g, " ").trim();
    console.log(`\n${JSON.stringify({ version, check: name, reason })}`);
  }
}
