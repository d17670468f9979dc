//! Lists of hosts as Slurm writes them: `node[001-004,007],login1`, `rack[0-1]n[01-02]-ib`.
//!
//! Names come in the order of `scontrol show hostnames`: entries as they stand, and of several brackets in an entry the
//! last one fastest. A range is padded with zeros to the width of its low end.

/// A list whose names are made one at a time: a range of a few bytes may stand for any number of them.
#[derive(Debug)]
pub(super) struct HostList(Vec<Entry>);

/// A name, or all names of one pattern.
#[derive(Debug)]
struct Entry(Vec<Part>);

#[derive(Debug)]
enum Part {
    Text(String),
    Ranges(Vec<Range>),
}

#[derive(Debug)]
struct Range {
    low: u64,
    high: u64,
    width: usize,
}

impl HostList {
    /// Reads a list, or says what is wrong with it.
    pub fn parse(text: &str) -> Result<HostList, String> {
        if let Some(odd) = text.chars().find(|c| !c.is_ascii_alphanumeric() && !"-._,[]".contains(*c)) {
            return Err(format!("'{}' is in no list of hosts", odd.escape_default()));
        }
        let mut entries = Vec::new();
        let mut rest = text;
        loop {
            let (entry, more) = entry(rest)?;
            entries.push(entry);
            match more {
                Some(more) => rest = more,
                None => return Ok(HostList(entries)),
            }
        }
    }

    /// The names, in order.
    pub fn names(&self) -> impl Iterator<Item = String> {
        self.0.iter().flat_map(|entry| (0..entry.count()).map(|place| entry.name(place)))
    }
}

/// Reads up to the comma that ends an entry, and gives what follows it.
fn entry(text: &str) -> Result<(Entry, Option<&str>), String> {
    let mut parts = Vec::new();
    let mut rest = text;
    let more = loop {
        let end = rest.find(['[', ']', ',']).unwrap_or(rest.len());
        let (plain, tail) = rest.split_at(end);
        if !plain.is_empty() {
            parts.push(Part::Text(plain.into()));
        }
        let Some(inside) = tail.strip_prefix('[') else {
            match tail.strip_prefix(',') {
                Some(more) => break Some(more),
                None if tail.is_empty() => break None,
                None => return Err("a bracket ends that does not begin".into()),
            }
        };
        let Some((ranges, after)) = inside.split_once(']') else { return Err("a bracket does not end".into()) };
        parts.push(Part::Ranges(ranges.split(',').map(range).collect::<Result<_, _>>()?));
        rest = after;
    };
    if parts.is_empty() {
        return Err("a name is empty".into());
    }
    let entry = Entry(parts);
    let counts = entry.0.iter().map(Part::count);
    match counts.into_iter().try_fold(1u64, |all, count| all.checked_mul(count?)) {
        Some(_) => Ok((entry, more)),
        None => Err("so many names cannot be counted".into()),
    }
}

fn range(text: &str) -> Result<Range, String> {
    let (low, high) = text.split_once('-').unwrap_or((text, text));
    let number = |digits: &str| {
        // No number has more, and no name that many zeros before it.
        let all = (1..=20).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_digit());
        digits.parse().ok().filter(|_| all)
    };
    match (number(low), number(high)) {
        (Some(first), Some(last)) if first <= last => Ok(Range { low: first, high: last, width: low.len() }),
        (Some(_), Some(_)) => Err(format!("the range {text} goes down")),
        _ => Err(format!("'{text}' in brackets is no number and no range of numbers")),
    }
}

impl Entry {
    /// How many names it stands for; checked when it was read.
    fn count(&self) -> u64 {
        self.0.iter().filter_map(Part::count).product()
    }

    /// The name at a place below [`count`](Entry::count): its digits, each of its bracket's base.
    fn name(&self, mut place: u64) -> String {
        let mut parts: Vec<String> = Vec::with_capacity(self.0.len());
        for part in self.0.iter().rev() {
            let count = part.count().unwrap_or(1);
            parts.push(part.text(place % count));
            place /= count;
        }
        parts.reverse();
        parts.concat()
    }
}

impl Part {
    /// None where they cannot be counted.
    fn count(&self) -> Option<u64> {
        match self {
            Part::Text(_) => Some(1),
            Part::Ranges(ranges) => ranges
                .iter()
                .map(|range| (range.high - range.low).checked_add(1))
                .try_fold(0u64, |all, count| all.checked_add(count?)),
        }
    }

    fn text(&self, mut place: u64) -> String {
        match self {
            Part::Text(text) => text.clone(),
            Part::Ranges(ranges) => {
                for Range { low, high, width } in ranges {
                    if place <= high - low {
                        return format!("{:0width$}", low + place);
                    }
                    place -= high - low + 1;
                }
                String::new()
            }
        }
    }
}

#[cfg(all(test, not(bonfire_loom)))]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use bonfire_testing::fuzz::fuzz;

    fn names(text: &str) -> Vec<String> {
        HostList::parse(text).unwrap_or_else(|e| panic!("{text}: {e}")).names().collect()
    }

    #[test]
    fn lists_of_allocations_are_expanded_as_scontrol_documents() {
        let cases: [(&str, &[&str]); 11] = [
            ("node[001-004,007]", &["node001", "node002", "node003", "node004", "node007"]),
            ("a1,b[2-3]", &["a1", "b2", "b3"]),
            ("login", &["login"]),
            ("node[9-11]", &["node9", "node10", "node11"]),
            ("node[08-10]", &["node08", "node09", "node10"]),
            ("n[098-101]", &["n098", "n099", "n100", "n101"]),
            ("rack[0-1]n[01-02]", &["rack0n01", "rack0n02", "rack1n01", "rack1n02"]),
            ("gpu[1,3]-ib,cpu7.local", &["gpu1-ib", "gpu3-ib", "cpu7.local"]),
            ("n[5],n5", &["n5", "n5"]),
            ("[1-2]", &["1", "2"]),
            (
                "tux[0-1,4],dev-a_[7]x[8-9],dev[0,10]",
                &["tux0", "tux1", "tux4", "dev-a_7x8", "dev-a_7x9", "dev0", "dev10"],
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(names(text), expected, "{text}");
        }
    }

    #[test]
    fn lists_without_an_end_are_had_name_by_name() {
        let list = HostList::parse("n[0-4000000000]x[0-4000000000],m").unwrap();
        assert_eq!(list.names().take(2).collect::<Vec<_>>(), ["n0x0", "n0x1"]);
        assert_eq!(list.names().nth(40_000).unwrap(), "n0x40000");
    }

    #[test]
    fn malformed_lists_are_refused() {
        let cases = [
            ("", "empty"),
            ("a,", "empty"),
            (",a", "empty"),
            ("a,,b", "empty"),
            ("node[1-", "does not end"),
            ("node[1", "does not end"),
            ("node1]", "does not begin"),
            ("node[1]]", "does not begin"),
            ("node[]", "no number"),
            ("node[1-]", "no number"),
            ("node[-1]", "no number"),
            ("node[a-b]", "no number"),
            ("node[1-2-3]", "no number"),
            ("node[[1]]", "no number"),
            ("node[1,,2]", "no number"),
            ("node[99999999999999999999]", "no number"),
            ("node[3-1]", "goes down"),
            ("node[0-18446744073709551615]", "counted"),
            ("n[0-9999999999]m[0-9999999999]", "counted"),
            ("node 1", "' '"),
            ("node[1;2]", "';'"),
            ("n\u{f6}de", "'\\u{f6}'"),
        ];
        for (text, reason) in cases {
            let error = HostList::parse(text).map(|list| list.names().next()).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn fuzz_lists_of_hosts() {
        let seeds = ["node[001-004,007]", "a1,b[2-3]", "rack[0-1]n[01-02]-ib,x", "n[0-18446744073709551614]"];
        fuzz("hostlist", seeds.map(|seed| seed.as_bytes().to_vec()), |bytes| {
            let Ok(text) = std::str::from_utf8(bytes) else { return false };
            let list = HostList::parse(text);
            if let Ok(list) = &list {
                let first: Vec<String> = list.names().take(3).collect();
                assert!(!first.is_empty() && first.iter().all(|name| !name.is_empty() && !name.contains(['[', ','])));
            }
            list.is_ok()
        });
    }

    proptest! {
        /// Against all names written out, by nested loops.
        #[test]
        fn brackets_are_the_product_of_their_ranges(
            entries in vec(("[a-z]{1,3}", vec(vec((0u64..1200, 0u64..5, 1usize..5), 1..4), 0..3), "[a-z-]{0,2}"), 1..4)
        ) {
            let (mut text, mut expected) = (Vec::new(), Vec::new());
            for (prefix, brackets, suffix) in entries {
                let (mut written, mut all) = (prefix.clone(), vec![prefix]);
                for ranges in brackets {
                    let one = |&(low, more, width): &(u64, u64, usize)| match more {
                        0 => format!("{low:0width$}"),
                        _ => format!("{low:0width$}-{}", low + more),
                    };
                    written += &format!("[{}]", ranges.iter().map(one).collect::<Vec<_>>().join(","));
                    let numbers: Vec<String> = ranges
                        .iter()
                        .flat_map(|&(low, more, width)| (low..=low + more).map(move |n| (n, format!("{low:0width$}").len())))
                        .map(|(n, width)| format!("{n:0width$}"))
                        .collect();
                    all = all.iter().flat_map(|name| numbers.iter().map(move |n| format!("{name}{n}"))).collect();
                }
                text.push(written + &suffix);
                expected.extend(all.into_iter().map(|name| name + &suffix));
            }
            prop_assert_eq!(names(&text.join(",")), expected);
        }
    }
}
