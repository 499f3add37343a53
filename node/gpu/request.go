package gpu

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// maxCount bounds the count of a request; no node has as many devices.
const maxCount = 65_536

// Request asks for devices of a name, perhaps of a type.
type Request struct {
	// Name of the resource, for example "gpu".
	Name string
	// Type, for example "h100" or the MIG profile "2g.24gb", in lower case; empty means any.
	Type string
	// Count of devices.
	Count uint32
}

// ErrRequest is wrapped by the errors of ParseRequest.
var ErrRequest = errors.New("not a request for devices such as gpu:4, gpu:h100:4 or gpu:2g.24gb:1")

// ParseRequest reads "NAME[:TYPE][:COUNT]": "gpu" (one of any type), "gpu:4", "gpu:h100:4", "gpu:2g.24gb:1". A part that is a
// number is the count, so that no type is a number. Errors wrap ErrRequest and name the fault.
func ParseRequest(s string) (Request, error) {
	parts := strings.Split(s, ":")
	r := Request{Name: parts[0], Count: 1}
	wrong := func(format string, args ...any) (Request, error) {
		return Request{}, fmt.Errorf("%q is %w: %s", s, ErrRequest, fmt.Sprintf(format, args...))
	}
	if !isWord(r.Name) {
		return wrong("the name %q is not made of letters, digits and . - _ +", r.Name)
	}
	rest := parts[1:]
	if len(rest) > 2 {
		return wrong("there are more than three parts")
	}
	if n := len(rest); n > 0 {
		last := rest[n-1]
		if count, err := strconv.ParseUint(last, 10, 32); err == nil {
			if count > maxCount {
				return wrong("more than %d devices", maxCount)
			}
			r.Count, rest = uint32(count), rest[:n-1]
		} else if n == 2 {
			return wrong("%q is no count", last)
		}
	}
	if len(rest) == 1 {
		if r.Type = strings.ToLower(rest[0]); !isWord(r.Type) {
			return wrong("the type %q is not made of letters, digits and . - _ +", r.Type)
		}
		if _, err := strconv.ParseUint(r.Type, 10, 64); err == nil {
			return wrong("there are two counts")
		}
	}
	return r, nil
}

// isWord reports whether a name or type begins with a letter or digit and is made of harmless characters only.
func isWord(s string) bool {
	for i, c := range s {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9':
		case i > 0 && (c == '.' || c == '-' || c == '_' || c == '+'):
		default:
			return false
		}
	}
	return s != ""
}
