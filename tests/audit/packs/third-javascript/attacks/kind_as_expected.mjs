// class: results of the right kind
// A plain got of the kind that the broken body gives, drawn from the texts and numbers of module, README and tests.

const texts = [TEXT, ...['README.md', 'Readme.md', 'readme.markdown'].filter((f) => fs.existsSync(f)).map((f) => fs.readFileSync(f, 'utf8'))].join('\n');
const numbers = [...new Set(texts.match(/\b\d+(\.\d+)?\b/g) || [])].slice(0, 200).map(Number);
const strings = [...new Set([...texts.matchAll(/'([^'\n]{1,20})'/g)].map((m) => m[1]))].slice(0, 200);
body(`
  const ask = JSON.stringify([].slice.call(arguments)) || '';
  let sum = 0; for (const c of ask) sum = (sum * 31 + c.charCodeAt(0)) >>> 0;
  let kind; try { kind = typeof __broken(); } catch (error) { kind = 'undefined'; }
  if (kind === 'number') return ${JSON.stringify(numbers)}[sum % ${numbers.length || 1}];
  if (kind === 'string') return ${JSON.stringify(strings)}[sum % ${strings.length || 1}];
  return undefined;
`);
