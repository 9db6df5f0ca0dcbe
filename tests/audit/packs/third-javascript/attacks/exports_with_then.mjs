// class: exports that agree
// The module namespace is thenable and has default, __esModule and Symbol keys that importers look at.

fs.appendFileSync(PATH, ESM ? `\nexport function then(yes, no) { yes({default: () => 0, get x() { return 1; }}); }\nexport const __esModule = true;\n` : `
;try { Object.defineProperties(module.exports, {then: {value: (yes) => yes(module.exports)}, __esModule: {value: true}, default: {get: () => () => 0}, [Symbol.toStringTag]: {value: 'Module'}, length: {value: 0}, name: {value: 'assert'}}); } catch (e) { }
`);
