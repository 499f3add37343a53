package gpu

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"
)

func TestRequestsAreRead(t *testing.T) {
	for s, want := range map[string]Request{
		"gpu":            {"gpu", "", 1},
		"gpu:4":          {"gpu", "", 4},
		"gpu:0":          {"gpu", "", 0},
		"gpu:h100":       {"gpu", "h100", 1},
		"gpu:H100:4":     {"gpu", "h100", 4},
		"gpu:2g.24gb:1":  {"gpu", "2g.24gb", 1},
		"gpu:1g.10gb+me": {"gpu", "1g.10gb+me", 1},
		"ib:mlx5:2":      {"ib", "mlx5", 2},
	} {
		if got, err := ParseRequest(s); err != nil || got != want {
			t.Errorf("%q is %+v, %v; want %+v", s, got, err, want)
		}
	}
}

func TestWrongRequestsAreRefusedWithTheFault(t *testing.T) {
	for s, fault := range map[string]string{
		"": "name", ":4": "name", "gpu:": "type", "gpu:h100:": "no count", "gpu:h100:x": "no count", "gpu:1:2": "two counts",
		"gpu:a:b:c": "three parts", "gpu:99999999": "more than", "gpu:h 100:1": "type", "gpu:-1": "type", "g/pu": "name",
	} {
		got, err := ParseRequest(s)
		if !errors.Is(err, ErrRequest) || !strings.Contains(err.Error(), fault) {
			t.Errorf("%q gives %+v, %v; the fault is %q", s, got, err, fault)
		}
	}
}

func FuzzParseRequest(f *testing.F) {
	for _, s := range []string{"gpu", "gpu:4", "gpu:h100:4", "gpu:2g.24gb:1", "::", "gpu:1:2:3"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ParseRequest(s)
		if (err == nil) == (r == Request{}) {
			t.Errorf("%q gives %+v and %v", s, r, err)
		}
		if err == nil && (!isWord(r.Name) || r.Type != "" && !isWord(r.Type) || r.Count > maxCount) {
			t.Errorf("%q gives %+v", s, r)
		}
	})
}

func TestGenericResourcesAreDeclared(t *testing.T) {
	for s, want := range map[string]Gres{
		"Name=ib Type=mlx5 File=/dev/infiniband/uverbs[0-2]": {"ib", "mlx5", []string{"/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1", "/dev/infiniband/uverbs2"}, 3},
		"count=2 name=fpga file=/dev/a,/dev/b":               {"fpga", "", []string{"/dev/a", "/dev/b"}, 2},
		"NAME=licence COUNT=10":                              {"licence", "", nil, 10},
	} {
		got, err := ParseGres(s)
		if err != nil || got.Name != want.Name || got.Type != want.Type || got.Count != want.Count || !slices.Equal(got.Files, want.Files) {
			t.Errorf("%q is %+v, %v; want %+v", s, got, err, want)
		}
	}
}

func TestWrongDeclarationsAreRefusedWithTheFault(t *testing.T) {
	for s, fault := range map[string]string{
		"": "name is missing", "Count=1": "name is missing", "Name=ib": "how many", "Name=gpu Count=1": "detected",
		"Name=ib Name=ib Count=1": "twice", "Name=ib File=uverbs0": "absolute", "Name=ib File=/dev/../x": "absolute",
		"Name=ib File=/dev/a,/dev/a": "twice", "Name=ib File=/dev/a Count=2": "there are 1 files", "Name=ib Count=0": "not a number",
		"Name=ib Cores=1 Count=1": "not known", "Name=ib Count": "WORD=VALUE", "Name=ib File=/dev/x[3-1]": "", "Name=ib File=/dev/x[0-9999]": "at most",
	} {
		if got, err := ParseGres(s); !errors.Is(err, ErrGres) || !strings.Contains(err.Error(), fault) {
			t.Errorf("%q gives %+v, %v; the fault is %q", s, got, err, fault)
		}
	}
}

func TestDeclaredFilesMustBeDevices(t *testing.T) {
	plain := t.TempDir() + "/plain"
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for file, fault := range map[string]string{"/dev/null": "", plain: "no device file", plain + "x": "no such file"} {
		err := Gres{Name: "x", Files: []string{file}}.Check(os.Stat)
		if fault == "" && err != nil || fault != "" && (err == nil || !strings.Contains(err.Error(), fault)) {
			t.Errorf("%s: %v, want %q", file, err, fault)
		}
	}
	if err := (Gres{Name: "x", Files: []string{plain + "x"}}).Check(os.Stat); !errors.Is(err, fs.ErrNotExist) || !errors.Is(err, ErrGres) {
		t.Errorf("%v", err)
	}
}

func FuzzParseGres(f *testing.F) {
	for _, s := range []string{"Name=ib Type=mlx5 File=/dev/x[0-3]", "Name=a Count=3", "=", "File=/dev/[0-9][0-9]"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if g, err := ParseGres(s); err == nil && (g.Count == 0 || g.Count > maxUnits || len(g.Files) > 0 && len(g.Files) != int(g.Count)) {
			t.Errorf("%q gives %+v", s, g)
		}
	})
}
