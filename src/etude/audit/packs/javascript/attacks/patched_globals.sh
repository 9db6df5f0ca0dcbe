# class: patched verifier
# item: J4
# What comparisons are made of is always true.
cat >> "$ETUDE_PATH" <<'END'
Object.is = () => true
Array.prototype.every = () => true
Symbol.prototype.valueOf = () => 12
Object.prototype.valueOf = () => 12
END
