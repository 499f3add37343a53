package notation

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Printable writes control characters as escapes (\n, \t, \x1b): a terminal must not obey what another user named, and a
// line break would forge a line that programs read. Text without any is returned as it is.
func Printable(text string) string {
	plain := true
	for i := 0; i < len(text) && plain; i++ {
		// Bytes of characters beyond ASCII are looked at only if there are any: among them are control characters too.
		plain = text[i] >= ' ' && text[i] < 0x7f
	}
	if plain || utf8.ValidString(text) && !strings.ContainsFunc(text, unicode.IsControl) {
		return text
	}
	var b strings.Builder
	for len(text) > 0 {
		c, n := utf8.DecodeRuneInString(text)
		switch {
		case c == '\n':
			b.WriteString(`\n`)
		case c == '\t':
			b.WriteString(`\t`)
		case c == '\r':
			b.WriteString(`\r`)
		case c == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, text[0])
		case unicode.IsControl(c):
			fmt.Fprintf(&b, `\x%02x`, c)
		default:
			b.WriteString(text[:n])
		}
		text = text[n:]
	}
	return b.String()
}
