//! Parses lists of hosts as Slurm writes them: `node[001-004,007],login1`, `rack[0-1]n[01-02]-ib`.
//!
//! Names come in the order of `scontrol show hostnames`: entries in the order of the list, and a range from its low
//! end, padded with zeros as written.

/// Returns the first host of a list and whether it is the only one. The error says what is wrong with the list.
pub(super) fn first(text: &str) -> Result<(String, bool), String> {
    if let Some(odd) = text.chars().find(|c| !c.is_ascii_alphanumeric() && !"-._,[]".contains(*c)) {
        return Err(format!("'{}' cannot be part of a list of hosts", odd.escape_default()));
    }
    let mut inside = false;
    let entries = text.split(|c| {
        inside = c == '[' || inside && c != ']';
        c == ',' && !inside
    });
    let entries = entries.map(entry).collect::<Result<Vec<_>, _>>()?;
    let single = entries.len() == 1;
    let (host, alone) = entries.into_iter().next().ok_or("it is empty")?;
    Ok((host, single && alone))
}

/// Returns the first name of a pattern and whether it is the only one.
fn entry(mut text: &str) -> Result<(String, bool), String> {
    if text.is_empty() {
        return Err("a name is empty".into());
    }
    let (mut name, mut alone) = (String::new(), true);
    while let Some((plain, rest)) = text.split_once('[') {
        let Some((ranges, after)) = rest.split_once(']') else { return Err("a bracket is never closed".into()) };
        let ranges = ranges.split(',').map(range).collect::<Result<Vec<_>, _>>()?;
        alone &= matches!(ranges[..], [(_, true)]);
        name.extend([plain, ranges[0].0]);
        text = after;
    }
    name.push_str(text);
    if name.contains(']') {
        return Err("a bracket is closed but never opened".into());
    }
    Ok((name, alone))
}

/// Returns the low end of a range of numbers and whether it is also the high end.
fn range(text: &str) -> Result<(&str, bool), String> {
    let (low, high) = text.split_once('-').unwrap_or((text, text));
    let number = |digits: &str| {
        // No u64 has more digits, and no host name is padded with so many zeros.
        let all = (1..=20).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_digit());
        digits.parse::<u64>().ok().filter(|_| all)
    };
    match (number(low), number(high)) {
        (Some(first), Some(last)) if first <= last => Ok((low, first == last)),
        (Some(_), Some(_)) => Err(format!("the range {text} is descending")),
        _ => Err(format!("'{text}' in brackets is neither a number nor a range of numbers")),
    }
}

#[cfg(all(test, not(bonfire_loom)))]
mod tests {
    use bonfire_testing::fuzz::fuzz;
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_first_host_matches_scontrol() {
        let cases = [
            ("node[001-004,007]", "node001", false),
            ("a1,b[2-3]", "a1", false),
            ("login", "login", true),
            ("node[9-11]", "node9", false),
            ("node[08-10]", "node08", false),
            ("n[098-101]", "n098", false),
            ("rack[0-1]n[01-02]", "rack0n01", false),
            ("rack[0]n[01-02]", "rack0n01", false),
            ("gpu[1,3]-ib,cpu7.local", "gpu1-ib", false),
            ("gpu[3]-ib", "gpu3-ib", true),
            ("n[5],n5", "n5", false),
            ("n[5-5]", "n5", true),
            ("[1-2]", "1", false),
            ("tux[0-1,4],dev-a_[7]x[8-9],dev[0,10]", "tux0", false),
            ("n[0-4000000000]x[0-4000000000],m", "n0x0", false),
        ];
        for (text, host, alone) in cases {
            assert_eq!(first(text), Ok((host.into(), alone)), "{text}");
        }
    }

    #[test]
    fn malformed_lists_are_rejected() {
        let cases = [
            ("", "empty"),
            ("a,", "empty"),
            (",a", "empty"),
            ("a,,b", "empty"),
            ("node[1-", "never closed"),
            ("node[1", "never closed"),
            ("node1]", "never opened"),
            ("node[1]]", "never opened"),
            ("node[]", "neither a number"),
            ("node[1-]", "neither a number"),
            ("node[-1]", "neither a number"),
            ("node[a-b]", "neither a number"),
            ("node[1-2-3]", "neither a number"),
            ("node[[1]]", "neither a number"),
            ("node[1,,2]", "neither a number"),
            ("node[99999999999999999999]", "neither a number"),
            ("node[3-1]", "descending"),
            ("node 1", "' '"),
            ("node[1;2]", "';'"),
            ("n\u{f6}de", "'\\u{f6}'"),
        ];
        for (text, reason) in cases {
            let error = first(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn fuzz_lists_of_hosts() {
        let seeds = ["node[001-004,007]", "a1,b[2-3]", "rack[0-1]n[01-02]-ib,x", "n[0-18446744073709551614]"];
        fuzz("hostlist", seeds.map(|seed| seed.as_bytes().to_vec()), |bytes| {
            let Ok(text) = std::str::from_utf8(bytes) else { return false };
            let first = first(text);
            if let Ok((name, _)) = &first {
                assert!(!name.is_empty() && !name.contains(['[', ']', ',']));
            }
            first.is_ok()
        });
    }

    proptest! {
        /// Compares with the list of all names, written out by nested loops.
        #[test]
        fn the_first_host_is_the_first_of_all_names(
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
                        .flat_map(|&(low, more, width)| (low..=low + more)
                            .map(move |n| (n, format!("{low:0width$}").len())))
                        .map(|(n, width)| format!("{n:0width$}"))
                        .collect();
                    all = all.iter().flat_map(|name| numbers.iter().map(move |n| format!("{name}{n}"))).collect();
                }
                text.push(written + &suffix);
                expected.extend(all.into_iter().map(|name| name + &suffix));
            }
            let alone = expected.len() == 1;
            prop_assert_eq!(first(&text.join(",")), Ok((expected.swap_remove(0), alone)));
        }
    }
}
