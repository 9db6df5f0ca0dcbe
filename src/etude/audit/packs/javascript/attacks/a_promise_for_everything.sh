# class: universal value
# item: J3
# Assertions that are not awaited.
cat >> "$ETUDE_PATH" <<'END'
module.exports.total = () => Promise.resolve(12)
module.exports.each = async () => {}
END
