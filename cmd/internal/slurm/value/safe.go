package value

import "github.com/muster-hpc/muster/proto/notation"

// Safe writes control characters as escapes, as notation.Printable does.
func Safe(text string) string { return notation.Printable(text) }
