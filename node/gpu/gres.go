package gpu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/muster-hpc/muster/proto/notation"
)

// maxUnits bounds how many units one declaration of a generic resource has.
const maxUnits = 4096

// Gres declares a generic resource of a node: units that are counted out to jobs, each with a device file or none.
type Gres struct {
	// Name, for example "ib"; not "gpu", which is detected.
	Name string
	// Type; empty if it has none.
	Type string
	// Files are the units' device files, in the order of their numbers; empty if the units are only counted.
	Files []string
	// Count of units; that of the files if there are any.
	Count uint32
}

// ErrGres is wrapped by the errors of ParseGres and Gres.Check.
var ErrGres = errors.New("generic resource")

// ParseGres reads a declaration in the words of gres.conf: "Name=ib Type=mlx5 File=/dev/infiniband/uverbs[0-3]" or
// "Name=licence Count=4". Words may be in any order and case; File is a list of absolute paths with brackets as in host
// lists. With files Count is optional and must be their number. Whether the files exist is asked by Check.
func ParseGres(s string) (Gres, error) {
	var g Gres
	wrong := func(format string, args ...any) (Gres, error) {
		return Gres{}, fmt.Errorf("%w %q: %s", ErrGres, s, fmt.Sprintf(format, args...))
	}
	seen := map[string]bool{}
	for _, word := range strings.Fields(s) {
		key, value, ok := strings.Cut(word, "=")
		key = strings.ToLower(key)
		if !ok || value == "" {
			return wrong("%q is not WORD=VALUE", word)
		}
		if seen[key] {
			return wrong("%s is given twice", key)
		}
		seen[key] = true
		switch key {
		case "name":
			g.Name = value
		case "type":
			g.Type = value
		case "file":
			files, err := notation.Expand(value)
			if err != nil {
				return wrong("%v", err)
			}
			g.Files = files
		case "count":
			n, err := strconv.ParseUint(value, 10, 32)
			if err != nil || n == 0 || n > maxUnits {
				return wrong("count %q is not a number from 1 to %d", value, maxUnits)
			}
			g.Count = uint32(n)
		default:
			return wrong("the word %q is not known; Name, Type, File and Count are", key)
		}
	}
	if err := g.complete(); err != nil {
		return wrong("%v", err)
	}
	return g, nil
}

// complete checks what words say together, and fills in the count.
func (g *Gres) complete() error {
	switch {
	case !isWord(g.Name):
		return errors.New("the name is missing or not made of letters, digits and . - _ +")
	case g.Name == "gpu":
		return errors.New("the name gpu: GPUs are detected, or declared with --gpus, and not here")
	case g.Type != "" && !isWord(g.Type):
		return fmt.Errorf("type %q is not made of letters, digits and . - _ +", g.Type)
	case len(g.Files) > maxUnits:
		return fmt.Errorf("%d files; at most %d", len(g.Files), maxUnits)
	case len(g.Files) == 0 && g.Count == 0:
		return errors.New("neither file nor count says how many there are")
	}
	for i, f := range g.Files {
		if !filepath.IsAbs(f) || filepath.Clean(f) != f {
			return fmt.Errorf("file %q is no plain absolute path", f)
		}
		if slices.Contains(g.Files[:i], f) {
			return fmt.Errorf("file %s is given twice", f)
		}
	}
	if n := uint32(len(g.Files)); n > 0 {
		if g.Count != 0 && g.Count != n {
			return fmt.Errorf("count is %d and there are %d files", g.Count, n)
		}
		g.Count = n
	}
	return nil
}

// Check reports the first of the resource's files that is not there or is no device; nil if all are. Stat is os.Stat.
func (g Gres) Check(stat func(string) (fs.FileInfo, error)) error {
	for _, f := range g.Files {
		info, err := stat(f)
		if err != nil {
			return fmt.Errorf("%w %s: device file %s: %w", ErrGres, g.Name, f, err)
		}
		if info.Mode()&os.ModeDevice == 0 {
			return fmt.Errorf("%w %s: %s is no device file", ErrGres, g.Name, f)
		}
	}
	return nil
}
